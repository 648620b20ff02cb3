"""Which bytes are scored, and with how much context."""

import math

import pytest
import torch
import torch.nn.functional as F
from distributed import run as run_ranks

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.training import scoring
from ring_dilated_attention.training.data import Document
from ring_dilated_attention.training.run_report import by_context

TEXT = b"".join(f"line {i} of the document\n".encode() for i in range(120))


def make_model(parallel=None):
    torch.manual_seed(0)
    return LongNetLM(LongNetConfig((16, 64), (1, 3), embed_dim=16, num_heads=2), parallel=parallel)


def bits_after(model, start, position):
    """The bits of one byte that has the bytes from `start` on before it."""
    logits = model(torch.tensor([list(TEXT[start:position])]))[0, -1]
    return F.cross_entropy(logits, torch.tensor(TEXT[position])).item() / math.log(2)


@pytest.mark.parametrize("seq_len", [7, 64])
def test_every_held_out_byte_is_scored_once(seq_len, monkeypatch):
    """Catches bytes that a change of --seq-len moves out of what is scored, and contexts that see each other."""
    monkeypatch.setattr(scoring, "POSITIONS_AT_ONCE", 30)
    model, document = make_model(), Document(TEXT, "text", seq_len, 70)
    num_train = len(TEXT) - 70
    expected = [
        bits_after(model, p - (p - num_train) % seq_len - 1, p) for p in range(num_train, len(TEXT))
    ]
    found = scoring.held_out_bits_per_byte(model, document)
    assert found == pytest.approx(sum(expected) / 70, rel=1e-5)


def cut(model):
    return scoring.bits_by_context(model, Document(TEXT, "text", 64, 150))


def cut_on_ranks(rank, world_size):
    scoring.CUTS, scoring.CUT_BYTES = (8, 20), 100
    return cut(make_model(ContextParallel()))


def test_contexts_are_cut_for_the_same_bytes(monkeypatch):
    monkeypatch.setattr(scoring, "CUTS", (8, 20, 32))
    monkeypatch.setattr(scoring, "CUT_BYTES", 100)
    model, begin = make_model(), len(TEXT) - 150 + 32
    found = cut(model)
    assert found["least_context"] == [8, 20, 32]  # 32 is half a sequence, and no cut
    targets = [p for p in range(100) if all((p % c + c) % 16 >= 8 for c in (8, 20, 32))]
    assert found["num_bytes"] == len(targets) > 10
    for c, bits in zip(found["least_context"], found["bits_per_byte"], strict=True):
        expected = [bits_after(model, begin + p - p % c - c, begin + p) for p in targets]
        assert bits == pytest.approx(sum(expected) / len(targets), rel=1e-5)
    for on_rank in run_ranks(2, cut_on_ranks):
        assert on_rank["bits_per_byte"] == pytest.approx(found["bits_per_byte"], rel=1e-5)
    assert scoring.bits_by_context(model, Document(TEXT, "text", 16, 150)) is None


def test_it_is_said_where_context_does_not_help():
    record = {"run_folder": "runs/a b", "bits_by_context": None}
    assert by_context(record) == []
    record["bits_by_context"] = {
        "num_bytes": 1000,
        "least_context": [64, 512, 2048],
        "bits_per_byte": [2.0, 1.9, 1.895],
    }
    assert by_context(record) == [
        "with the model's context cut, on 1,000 of these bytes:",
        "            64 to 127 bytes before  2.000",
        "         512 to 1,023 bytes before  1.900",
        "       2,048 to 4,095 bytes before  1.895",
        "Context beyond 1,024 bytes did not help this model.",
        "See docs/learning.md. Another text: rda evaluate 'runs/a b' FILE",
    ]
    record["bits_by_context"]["bits_per_byte"] = [2.0, 1.9, 1.8]
    assert len(by_context(record)) == 4


def test_context_that_harms_is_not_said_to_be_useless():
    """Catches a comparison with the longest context alone: here it is no better than the shortest."""
    found = {
        "num_bytes": 9,
        "least_context": [64, 512, 4096, 16384],
        "bits_per_byte": [2.50, 2.30, 2.31, 2.495],
    }
    assert by_context({"run_folder": "a", "bits_by_context": found})[-2] == (
        "Context beyond 1,024 bytes made this model worse, by up to 0.195 bits."
    )

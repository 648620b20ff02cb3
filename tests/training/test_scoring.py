"""Which bytes are scored, and with how much context."""

import gzip
import math

import pytest
import torch
import torch.nn.functional as F
from distributed import run as run_ranks

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.training import scoring
from ring_dilated_attention.training.data import Document

TEXT = b"".join(f"line {i} of the document\n".encode() for i in range(120))


def make_model(parallel=None):
    torch.manual_seed(0)
    return LongNetLM(LongNetConfig((16, 64), (1, 3), embed_dim=16, num_heads=2), parallel=parallel)


def bits_after(model, start, position):
    """The bits of one byte that has the bytes from `start` on before it."""
    logits = model(torch.tensor([list(TEXT[start:position])]))[0, -1]
    return F.cross_entropy(logits, torch.tensor(TEXT[position])).item() / math.log(2)


@pytest.mark.parametrize("seq_len", [7, 64])
def test_every_held_out_byte_is_scored_once(seq_len):
    """Catches bytes that a change of --seq-len moves out of what is scored, and contexts that see each other."""
    model, document = make_model(), Document(TEXT, "text", seq_len, 70)
    num_train = len(TEXT) - 70
    expected = [
        bits_after(model, p - (p - num_train) % seq_len - 1, p) for p in range(num_train, len(TEXT))
    ]
    found = scoring.held_out_bits_per_byte(model, document)
    assert found == pytest.approx(sum(expected) / 70, rel=1e-5)


def on_ranks(rank, world_size):
    return scoring.held_out_bits_per_byte(
        make_model(ContextParallel()), Document(TEXT, "a", 64, 150)
    )


def test_ranks_score_what_one_does():
    found = scoring.held_out_bits_per_byte(make_model(), Document(TEXT, "a", 64, 150))
    assert run_ranks(2, on_ranks) == pytest.approx([found, found], rel=1e-5)


def test_gzip_sees_the_held_out_bytes_alone():
    document = Document(bytes(range(256)) * 9 + b"aaab" * 16, "test", 64, 64)
    packed = gzip.compress(b"aaab" * 16, 9, mtime=0)
    assert scoring.gzip_bits_per_byte(document) == 8 * len(packed) / 64

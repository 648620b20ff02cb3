"""The study of text goes on where it ended, and says when one pattern overtakes another."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks import command
from benchmarks.learn import text
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.training.data import Document

TEXT = b"".join(f"line {i} of the document\n".encode() for i in range(120))


def test_a_curve_overtakes_another():
    shorter = [[0, 0, 0, 5.0], [10, 5, 0, 4.0], [20, 10, 0, 3.5]]
    longer = [[0, 0, 0, 5.0], [10, 10, 0, 4.2], [20, 20, 0, 3.0]]
    assert text.bits_at(shorter, 0, 15) == 3.75
    assert text.bits_at(shorter, 0, 21) is None
    assert text.overtakes(longer, shorter, 0) == 20
    assert text.overtakes(longer, shorter, 1) is None
    assert text.overtakes(shorter, longer, 1) == 5


def test_contexts_are_cut_for_the_same_bytes(monkeypatch):
    monkeypatch.setattr(text, "CUTS", (8, 20, 32))
    monkeypatch.setattr(text, "CUT_BYTES", 100)
    monkeypatch.setattr(text, "ROWS", 50)
    torch.manual_seed(0)
    model = LongNetLM(LongNetConfig((16, 64), (1, 3), embed_dim=16, num_heads=2))
    begin = len(TEXT) - 150 + 32
    found = text.bits_by_context(model, Document(TEXT, "text", 64, 150))
    assert found["least_context"] == [8, 20, 32]  # 32 is half a sequence, and no cut
    targets = [p for p in range(100) if all((p % c + c) % 16 >= 8 for c in (8, 20, 32))]
    assert found["num_bytes"] == len(targets) > 10
    for c, bits in zip(found["least_context"], found["bits_per_byte"], strict=True):
        nats = 0.0
        for p in targets:
            before = torch.tensor([list(TEXT[begin + p - p % c - c : begin + p])])
            nats += F.cross_entropy(model(before)[0, -1], torch.tensor(TEXT[begin + p])).item()
        assert bits == pytest.approx(nats / len(targets) / math.log(2), rel=1e-5)
    assert text.bits_by_context(model, Document(TEXT, "text", 16, 150)) is None


def test_the_study_goes_on_where_it_ended(tmp_path, monkeypatch):
    """Each run is kept when it is done. A second start makes the missing ones alone; a page follows."""
    learn = ["learn", "--quick", "--results", str(tmp_path / "results")]
    whole, made = text.run_one, []

    def stops_at_the_second(*arguments):
        made.append(arguments)
        if len(made) == 2:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(text, "run_one", stops_at_the_second)
    assert command.main(learn) == 130
    kept = tmp_path / "results" / "learn_text.json"
    [first] = json.loads(kept.read_text())["rows"]
    assert command.main([*learn, "--only", "no such run"]) == 0
    assert len(made) == 2
    assert command.main(learn) == 0
    record = json.loads(kept.read_text())
    assert record["command"] == "python -m benchmarks learn --quick"
    assert record["rows"][0] == first
    assert [row["name"] for row in record["rows"]] == [
        "(8)/(1), 2 steps or 1 s, seed 0",
        "(64)/(1), 2 steps or 1 s, seed 0",
    ]
    assert len(made) == 3
    assert "## learn_text\n" in (tmp_path / "README.md").read_text()


def test_the_record_is_of_the_runs_that_there_are():
    """Catches settings that were changed, after which a start would train all models again."""
    from benchmarks.learn.command import NAME, is_done, rows_of

    rows = rows_of(command.RESULTS / f"{NAME}.json")
    missing = [run.name for run in text.runs(text.FULL) if not is_done(run, rows)]
    assert missing == []

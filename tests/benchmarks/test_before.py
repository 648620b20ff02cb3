"""An earlier commit beside this one: rows of records that are already there, without a run."""

import json

import pytest

from benchmarks import before


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """A checkout whose record of `linear` is this one's with twice the times, and no run."""
    monkeypatch.setattr(before, "python", lambda checkout, *arguments: "0.5")
    record = json.loads((before.RESULTS / "linear.json").read_text())
    for row in record["rows"]:
        row["seconds"] |= {name: 2 * row["seconds"][name] for name in ("min", "median", "max")}
    path = tmp_path / "benchmarks/results/linear.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record))
    return path


def test_times_stand_beside_each_other(earlier):
    rows = before.compared("linear", earlier.parents[2], "a1b2c3d")
    assert {row["what"]: row["ratio"] for row in rows} == {"float32, forward seconds": 1.0, "float32, seconds": 0.5}
    assert "seconds at a1b2c3d" in before.table(rows)
    assert before.small_call(earlier.parents[2], "a1b2c3d")["ratio"] == 1.0


def test_another_case_is_not_compared(earlier):
    record = json.loads(earlier.read_text())
    record["rows"][1]["seq_len"] += 1
    earlier.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="linear measures something else now than at a1b2c3d"):
        before.compared("linear", earlier.parents[2], "a1b2c3d")


def test_an_unknown_commit_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        before.main(["no_such_commit"])
    assert ended.value.code == 2
    assert "this clone has no commit 'no_such_commit'" in capsys.readouterr().err

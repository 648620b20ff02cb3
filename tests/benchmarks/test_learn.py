"""The study of text goes on where it ended, and says when one pattern overtakes another."""

import json

from benchmarks import command
from benchmarks.learn import text


def test_a_curve_overtakes_another():
    shorter = [[0, 0, 0, 5.0], [10, 5, 0, 4.0], [20, 10, 0, 3.5]]
    longer = [[0, 0, 0, 5.0], [10, 10, 0, 4.2], [20, 20, 0, 3.0]]
    assert text.bits_at(shorter, 0, 15) == 3.75
    assert text.bits_at(shorter, 0, 21) is None
    assert text.overtakes(longer, shorter, 0) == 20
    assert text.overtakes(longer, shorter, 1) is None
    assert text.overtakes(shorter, longer, 1) == 5


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

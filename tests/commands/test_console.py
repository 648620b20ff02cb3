"""What commands show: tables, text and progress, on a terminal and in a file."""

import io
import os
import sys

import pytest

from ring_dilated_attention.commands import console


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_table_in_a_file_has_a_line_for_each_row(monkeypatch):
    """Catches cells that are folded or cut where nobody sees a width, and words that rich takes for its own marks."""
    monkeypatch.setenv("COLUMNS", "40")
    rows = [("[red]a:smile:", "why " * 50, "12.5 GB"), ("b", "", "7 B")]
    lines = console.table(("name", "reason", "memory"), rows, num_left=2).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("[red]a:smile:  why why")
    assert lines[1].endswith("12.5 GB")
    assert lines[2].endswith("    7 B")
    assert {len(line) for line in lines} == {len(lines[0])}


def test_a_table_that_is_too_wide_stays_whole(monkeypatch):
    """Catches columns and ends of numbers that are missing on a terminal of 80, and a word that is cut in two."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", Terminal())
    headers = ("rank", "exchange", *(f"column {i}" for i in range(5)))
    row = ("7", "2-D, 4 deal heads", *["12.345 GB"] * 5)
    text = console.table(headers, [row], num_left=2)
    assert text.count("12.345 GB") == 5
    assert {word for cell in (*headers, *row) for word in cell.split()} == set(text.split())
    assert len(text.splitlines()) == 2


def test_wrapped_text_keeps_its_paths_whole():
    path = "/a/" + "b" * 90
    lines = console.wrapped(f"{'word ' * 30}{path} more\nsecond line").splitlines()
    assert path in " ".join(lines).split()
    assert lines[-1] == "second line"
    assert all(len(line) <= 80 for line in lines if path not in line)


def do_ten():
    with console.progress(10, "case") as bar:
        for i in range(10):
            bar.note(f"case [{i}]")
            bar.update()


def test_on_a_terminal_there_is_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", Terminal())
    do_ten()
    text = sys.stderr.getvalue()
    assert "10/10" in text
    assert "case [9]" in text
    assert capsys.readouterr().out == ""


def test_in_a_log_there_is_a_line_every_ten_seconds(monkeypatch, capsys):
    """Catches thousands of redrawn bars in a log."""
    clock = iter(range(0, 1000, 4))  # a step takes four seconds
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    do_ten()
    assert capsys.readouterr().err.splitlines() == [
        "3 of 10 cases (case [2]), 12 s",
        "6 of 10 cases (case [5]), 24 s",
        "9 of 10 cases (case [8]), 36 s",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_that_nobody_sees_ends_nothing(is_terminal, monkeypatch):
    """Catches hours of work that end with the terminal that showed their progress."""
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        if is_terminal:
            monkeypatch.setattr(full, "isatty", lambda: True, raising=False)
        do_ten()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # for what it still holds

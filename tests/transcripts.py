"""Sessions in text files: commands after "$ ", and what they print, stdout before stderr.

For a new session write its commands alone. With WRITE_TRANSCRIPTS=1 in the environment its test writes what they print,
and fails where that is new: read what git diff shows.
"""

import difflib
import os
import re
import subprocess
from pathlib import Path
from shlex import split
from unittest import mock

from helpers import ROOT

from ring_dilated_attention.commands import cli

SESSIONS = ROOT / "tests" / "data" / "transcripts"
PREPARED = SESSIONS / "prepared"
# What differs from one machine or run to another, and what transcripts have in its place.
VARIES = {
    # progress, where it takes more than ten seconds
    r"^[\d,]+( of [\d,]+)? \w+( \(.*\))?, \d+ s\n": "",
    # of `rda train`, `rda evaluate` and `rda generate`
    r"(?<=^peak resident memory of a rank: )[\d,]+": "#",
    r"(?<=^speed: )[\d,]+ tokens/s; [\d,]+": "# tokens/s; #",
    r"\b\d\.\d{3,}": "#.###",
    r"\A(.|\n)*(?=\n[\d,]+ tokens in )": "<text>",
    r"(?<= tokens in )\d+\.\d\d": "#",
    r"(?<!\S)/\S+/(?=\w+\.txt)": "<folder>/",
    # of `rda check`: errors, tolerances, and which result came nearest to its tolerance
    r"\d\.\de-\d\d(?= +(\d\.\de-\d\d +)?(passed|failed)  )": "#.#e-##",
    r"(out|lse|d[qkv]) of '.*'$": "<result> of '<case>'",
    r"(?<= on host )\S+(?=:)": "<host>",
    # of `rda train`: words of torch, safetensors or Python
    r"(?<=cannot be read: )(Missing key in .*?/|SafetensorError: ).*(?=; move )": r"\1<...>",
    r"(?<=it is no JSON )\(.*\)": "(<reason>)",
    # of `rda embed`: words of torch, numpy, h5py or the system
    r"(?<=^rda embed: )"
    r"(slides/(damaged_2.npz|sparse.pt)|(--device \S+|--out /\S+|\S+) cannot be \w+): .*(\n .*)*": r"\1: <reason>",
}


def made_up(decoder, batch, rows, *_):
    """In place of `weigh_activations`, whose figures are those of torch and transformers."""
    return {"kept": 10_000 * rows, "checkpointed": 5_000 * rows}


def contents():
    """Of all files here; a folder has none."""
    return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}


@mock.patch.dict(os.environ, COLUMNS="80")
def play(session, capsys):
    """Compares what commands print, in this folder, with a transcript. Returns all that they printed, as it was.

    Catches a file or folder that a refused command leaves or writes over. Lines that do not begin with `rda`, or with
    its variables, are run by a shell."""
    expected = session.read_text()
    printed, shown = "", ""
    for line in re.findall(r"^\$ .*", expected, re.MULTILINE):
        before = contents()
        code = 0
        given, rda, words = line.removeprefix("$ ").partition("rda ")
        place = given.split()
        if rda and all("=" in word for word in place):
            with mock.patch.dict(os.environ, dict(word.split("=") for word in place)):
                code = cli.main(split(words, comments=True))
            out, error = capsys.readouterr()
            text = out + error
        else:
            text = subprocess.check_output(line[2:], shell=True, text=True)
        printed += text
        for pattern, instead in VARIES.items():
            text = re.sub(pattern, instead, text, flags=re.MULTILINE)
        shown += f"{line}\n{text}"
        if code:
            shown += f"exit code {code}\n"
        assert code != 2 or contents() == before
    if "WRITE_TRANSCRIPTS" in os.environ:
        session.write_text(shown)
    difference = difflib.unified_diff(expected.splitlines(), shown.splitlines(), lineterm="")
    assert shown == expected, "\n".join(difference)
    return printed

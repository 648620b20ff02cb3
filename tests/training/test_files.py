"""Whose a file is, and who may read it: what every writer of files asks before it writes, and what it leaves."""

import io
import json
import os
import stat
from functools import partial

import numpy as np
import pytest
from helpers import ROOT
from torch import nn

from benchmarks.record import is_page, is_record
from ring_dilated_attention.commands.embed.folder import EmbeddingFolder
from ring_dilated_attention.training.checkpoint import save_checkpoint
from ring_dilated_attention.training.files import mentions, write_whole
from ring_dilated_attention.training.loop import make_optimizers
from ring_dilated_attention.training.metrics import METRICS_FILE, Metrics, is_of
from ring_dilated_attention.training.options import Hyperparameters
from ring_dilated_attention.training.run_folder import (
    LOCK_FILE,
    STARTS_FILE,
    count_start,
    own_folder,
)

RUN = "0123456789abcdef"


PICTURE = b"\x89PNG\r\n\x1a\n and what follows"
SCRIPT = b"#!/usr/bin/env python\nfrom ring_dilated_attention import dilated_attention\n"


RECORD = {name: {} for name in ("date", "hardware", "versions")} | {"rows": []}
BENCHMARK = RECORD | {"command": "python -m benchmarks linear", "case": "linear", "commit": None}
TRAINED = {"run": RUN, "status": "complete", "step": 1}
PAGE = (ROOT / "benchmarks" / "README.md").read_text()
KNOWN = {  # how: ours, and those that only name us
    "benchmark": (
        is_record,
        json.dumps(BENCHMARK),
        [
            json.dumps(BENCHMARK | {"command": "make bench"}),
            json.dumps(BENCHMARK | {"notes": "mine"}),
            "[]",
        ],
    ),
    "page": (is_page, PAGE, [f"# My project\n\n{PAGE}", PAGE.replace("# Benchmarks", "# Speed")]),
    "run": (
        mentions(RUN),
        json.dumps(TRAINED),
        [json.dumps(TRAINED | {"run": "another"}), " " * 4096 + RUN],
    ),
    "metrics": (
        partial(is_of, run=None),
        f'{{"run": "{RUN}", "step": 1, "bits_per_byte": 8.0}}\n',
        ['{"run": "another"}\n', "[" * 10**5],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_whose_a_file_is(name):
    is_mine, ours, others = KNOWN[name]
    assert is_mine(io.BytesIO(ours.encode()))
    for content in (*map(str.encode, others), SCRIPT, b"\xff\xfe", PICTURE):
        assert not is_mine(io.BytesIO(content)), content


THEIRS = [b"mine\n", b"\xff", b"[" * 10**5, b'{"run": "b", "bits_per_byte": 2.0}\n', None]
BEGINNINGS = {
    METRICS_FILE: lambda folder: Metrics(folder, RUN, 0, 0),
    STARTS_FILE: partial(count_start, anew=False),
    LOCK_FILE: lambda folder: own_folder(folder).__enter__(),
}


@pytest.mark.parametrize("content", THEIRS)
@pytest.mark.parametrize("name", BEGINNINGS)
def test_what_somebody_else_put_where_a_run_writes_stays(name, content, tmp_path):
    """Files, and a folder."""
    path = tmp_path / name
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    said = "was not made by .*, and nothing is written over it|Is a directory"
    with pytest.raises((OSError, ValueError), match=said):
        BEGINNINGS[name](tmp_path)
    assert list(tmp_path.rglob("*")) == [path]
    assert content is None or path.read_bytes() == content


def test_the_records_that_are_there_are_known():
    others = ("faults.json", "fuzz.json", "restarts.json", "sockets.json")  # written by tests
    paths = [
        path for path in (ROOT / "benchmarks" / "results").glob("*.json") if path.name not in others
    ]
    for path in paths:
        with path.open("rb") as file:
            assert is_record(file), path
    assert paths


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o027, 0o022])
def test_others_may_read_what_the_umask_lets_them(umask, tmp_path):
    """Catches files that only their owner reads: of safetensors, and of temporary ones that are renamed."""
    model = nn.Linear(2, 2)
    optimizers = make_optimizers(model, Hyperparameters())
    before = os.umask(umask)
    try:
        save_checkpoint(tmp_path, {"run": RUN, "step": 3}, model, optimizers)
        with Metrics(tmp_path, RUN, 0, 0):
            pass
        write_whole(tmp_path / "record.json", b"{}", lambda file: True, "a test")
        EmbeddingFolder(tmp_path / "embeddings", {}).add("a", np.ones(1))
    finally:
        os.umask(before)
    modes = [mode(path) for path in tmp_path.rglob("*") if path.is_file()]
    assert modes == [0o666 & ~umask] * 6


def test_a_symlink_stays_and_what_it_leads_to_is_written(tmp_path):
    """Also one whose aim is not there yet."""
    (tmp_path / "disk").mkdir()
    for name in ("bits.png", "new.png"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    ours = f"of run {RUN}".encode()
    (tmp_path / "disk" / "bits.png").write_bytes(ours)
    for name in ("bits.png", "new.png"):
        write_whole(tmp_path / name, ours, mentions(RUN), "a test")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "disk" / name).read_bytes() == ours
    (tmp_path / "disk" / "bits.png").write_bytes(SCRIPT)
    with pytest.raises(ValueError, match=r"bits\.png was not made by a test"):
        write_whole(tmp_path / "bits.png", ours, mentions(RUN), "a test")


@pytest.mark.parametrize("given", [0o600, 0o664])
def test_what_is_replaced_keeps_its_mode(given, tmp_path):
    path = tmp_path / "record.json"
    path.touch()
    path.chmod(given)
    write_whole(path, b"2", lambda file: True, "a test")
    assert (path.read_bytes(), mode(path)) == (b"2", given)

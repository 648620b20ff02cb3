"""Weights and slides for the tests of `rda embed`, and what it writes."""

import json
import re
from unittest import mock

import numpy as np
import pytest
import torch
from torchscale_cases import TINY, fill, waves

from ring_dilated_attention.commands import cli
from ring_dilated_attention.models import LongNetViT, segment_lengths_for
from ring_dilated_attention.models.longnet_vit import DILATION_RATES, PUBLISHED

WIDTH, DEPTH = 32, 2
LENGTHS = {"a": 40, "b": 7, "c": 93}


def tiles(length, seed=0):
    return waves(length, 5, seed=seed).float(), (
        (waves(length, 2, seed=seed + 1) + 1) * 5000
    ).long()


def write(path, features, coords, names=("features", "coords"), attributes=None):
    arrays = {name: x for name, x in zip(names, (features, coords), strict=True) if x is not None}
    if path.suffix == ".h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            for name, x in arrays.items():
                file[name] = x.numpy()
                file[name].attrs.update(attributes or {})
    elif path.suffix == ".npz":
        np.savez(path, **{name: x.numpy() for name, x in arrays.items()}, **(attributes or {}))
    else:
        torch.save({**arrays, **(attributes or {})}, path)
    return path


def make_weights(tmp_path, width=WIDTH, depth=DEPTH):
    branches = {"segment_lengths": segment_lengths_for(), "dilation_rates": DILATION_RATES}
    model = fill(LongNetViT(5, width, depth, 16, **branches))
    torch.save({"model": model.state_dict()}, tmp_path / "slide_encoder.pth")
    return tmp_path / "slide_encoder.pth"


def make_slides(tmp_path):
    """One file of each kind."""
    (tmp_path / "slides").mkdir()
    kinds = {"a": ".h5", "b": ".npz", "c": ".pt"}
    return [
        write(tmp_path / "slides" / f"{name}{kinds[name]}", *tiles(length, i))
        for i, (name, length) in enumerate(LENGTHS.items())
    ]


@mock.patch.dict(PUBLISHED, tiny=TINY)
def embed(weights, out, *arguments):
    """With weights of `make_weights`, whose size counts as published."""
    return cli.main(["embed", *map(str, arguments), "--weights", str(weights), "--out", str(out)])


def unwrapped(text):
    """Each message on one line, as it was before it was wrapped at 80 columns."""
    return re.sub(r"\n +", " ", text)


def read(out):
    """Embeddings by name, and the settings."""
    embeddings = {path.stem: torch.from_numpy(np.load(path)) for path in sorted(out.glob("*.npy"))}
    return embeddings, json.loads((out / "settings.json").read_text())

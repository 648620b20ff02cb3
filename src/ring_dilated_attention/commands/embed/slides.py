"""Reads files of tile features and coordinates, as pathologists' tools write them: HDF5, npz, and torch's pt.

Features are (tiles, C), coordinates (tiles, 2), with or without a batch dim of 1. Pickled objects are never loaded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.weights import load_tensors
from ...ranks.failures import first_line

SUFFIXES = (".h5", ".hdf5", ".npz", ".pt", ".pth")
# The names that the array of features, or of coordinates, may have in a file. If a file has several of the names, the
# name that comes first in the tuple is used.
FEATURES, COORDS = (("features", "tile_embeds", "feats"), ("coords", "coordinates"))
TILE_SIZE = "patch_size_level0"  # TRIDENT's name for the distance from one tile to the next, in the unit of coordinates


def read_slide(path: Path, tile_size: float | None) -> tuple[Tensor, Tensor]:
    """Read a slide. Returns the features of its tiles (tiles, C), and their coordinates (tiles, 2).

    tile_size: the number of --tile-size; None if the user did not give it. Raises ValueError if the slide cannot be
    read. The message does not name the path, which the caller adds.
    """
    try:
        if path.suffix in (".h5", ".hdf5"):
            import h5py

            with h5py.File(path, "r") as file:
                return _arrays_of(file, file.attrs, tile_size)
        if path.suffix == ".npz":
            import numpy

            with numpy.load(path, allow_pickle=False) as file:
                return _arrays_of(file, file, tile_size)
        loaded = load_tensors(path, is_mapped=True)
        if not isinstance(loaded, dict):
            raise ValueError(
                f"holds a {type(loaded).__name__}, not a dict: save {{'features': ..., 'coords': ...}}"
            )
        return _arrays_of(loaded, loaded, tile_size)
    except ValueError:
        raise
    except Exception as error:
        # Catch any error, because a damaged file may raise any. HDF5 raises some errors only when features are read.
        raise ValueError(f"cannot be read: {first_line(error)}") from error


def _arrays_of(
    arrays: Mapping[str, Any], attributes: Mapping[str, Any], tile_size: float | None
) -> tuple[Tensor, Tensor]:
    features = _array(arrays, "features", FEATURES)
    coords = _array(arrays, "coordinates", COORDS)
    stated = attributes.get(TILE_SIZE, getattr(coords, "attrs", {}).get(TILE_SIZE, 256))
    if tile_size is None and stated != 256:
        raise ValueError(
            f"states {TILE_SIZE}={stated}, the step from tile to tile: pass --tile-size {stated}, or --tile-size 256 "
            "to take 256 as GigaPath does"
        )
    return _tensor(features), _tensor(coords)


def _array(arrays: Mapping[str, Any], what: str, names: Sequence[str]) -> Any:
    """Look up `names` in `arrays`, in order. Returns the first array found. An array of HDF5 is not read yet."""
    for name in names:
        if name in arrays:
            return arrays[name]
    there = ", ".join(map(str, arrays)) or "no arrays"
    raise ValueError(f"holds no {what}: it has {there}, and {' and '.join(names)} were looked for")


def _tensor(array: Any) -> Tensor:
    """The array as a tensor (tiles, ...), without a batch dim of 1."""
    values = torch.as_tensor(array[:])
    return values[0] if values.dim() == 3 and len(values) == 1 else values


def find_slides(paths: list[Path]) -> dict[str, Path]:
    """Find the slides among files and in folders. Returns a dict from names to files. A slide's name is its file's name
    without the suffix.

    Raises ValueError if two slides have the same name, or if there are no slides.
    """
    slides: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no {path}")
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        slides_here = [file for file in files if file.suffix in SUFFIXES]
        if not slides_here:
            raise ValueError(f"{path} holds no slides: files that end in {', '.join(SUFFIXES)}")
        for file in slides_here:
            other = slides.setdefault(file.stem, file)
            if other != file:
                raise ValueError(
                    f"{other} and {file} would both be called {file.stem!r}: rename one"
                )
    return slides

"""Reads files of tile features and coordinates, as pathologists' tools write them: HDF5, npz, and torch's pt.

Features are (tiles, C), coordinates (tiles, 2), with or without a batch dim of 1. Pickled objects are never loaded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.weights import first_line, load_tensors
from .folder import check_regular

SUFFIXES = (".h5", ".hdf5", ".npz", ".pt", ".pth")
# the first choice first
FEATURES, COORDS = (("features", "tile_embeds", "feats"), ("coords", "coordinates"))
TILE_SIZE = "patch_size_level0"  # TRIDENT's name for the distance from one tile to the next, in coordinates' units


class Slide(NamedTuple):
    """The features of a slide's tiles (tiles, C), and their coordinates (tiles, 2)."""

    features: Tensor
    coords: Tensor
    stated_tile_size: Any  # in the file's own type; None if it states none


def read_slide(path: Path) -> Slide:
    """A ValueError says, without the path, why a slide cannot be read."""
    check_regular(path)  # a pipe might never open
    try:
        if path.suffix in (".h5", ".hdf5"):
            import h5py

            with h5py.File(path, "r") as file:
                return _slide(file, file.attrs)
        if path.suffix == ".npz":
            import numpy

            with numpy.load(path, allow_pickle=False) as file:
                loaded = dict(file)
        else:
            loaded = load_tensors(path, is_mapped=True)
        if not isinstance(loaded, dict):
            raise ValueError(
                f"holds a {type(loaded).__name__} alone: save {{'features': ..., 'coords': ...}}"
            )
        return _slide(loaded, loaded)
    except ValueError:
        raise
    except Exception as error:
        # a damaged file raises anything, and HDF5 only once its features are read
        raise ValueError(f"cannot be read: {first_line(error)}") from error


def _slide(arrays: Mapping[str, Any], attributes: Mapping[str, Any]) -> Slide:
    features = _array(arrays, "features", FEATURES)
    coords = _array(arrays, "coordinates", COORDS)
    stated = attributes.get(TILE_SIZE, getattr(coords, "attrs", {}).get(TILE_SIZE))
    return Slide(_tensor(features), _tensor(coords), stated)


def _array(arrays: Mapping[str, Any], what: str, names: Sequence[str]) -> Any:
    """The first array with one of the names, which may be a data set of HDF5."""
    for name in names:
        if name in arrays:
            shape = tuple(getattr(arrays[name], "shape", None) or ())  # an empty data set's is None
            if len(shape) == 2 or (len(shape) == 3 and shape[0] == 1):
                return arrays[name]
            raise ValueError(
                f"{name} has shape {shape}, not (tiles, ...): {what} of the tiles of one slide"
            )
    there = ", ".join(map(str, arrays)) or "no arrays"
    raise ValueError(f"holds no {what}: it has {there}, and {' and '.join(names)} were looked for")


def _tensor(array: Any) -> Tensor:
    """The values (tiles, ...), in this machine's byte order."""
    values = array[0] if len(array.shape) == 3 else array[:]
    if not isinstance(values, Tensor):
        values = torch.as_tensor(values.astype(values.dtype.newbyteorder("="), copy=False))
    return values


def check_tile_size(slide: Slide, asked: float | None) -> None:
    """Raise ValueError if a file states another tile size than the default, and --tile-size was not given."""
    stated = slide.stated_tile_size
    if asked is None and stated is not None and stated != 256:
        size = f"{TILE_SIZE}={stated}, the step from tile to tile"
        raise ValueError(
            f"states {size}: pass --tile-size {stated}, or --tile-size 256 to take 256 as GigaPath does"
        )


def find_slides(paths: list[Path]) -> dict[str, Path]:
    """Each slide's file, by its name without suffix. A folder stands for the slides in it.

    Raises:
        ValueError: if two slides have one name, or there are none.
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

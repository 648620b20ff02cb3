"""Reads files of tile features and coordinates, as pathologists' tools write them: HDF5, npz, and torch's pt.

Features are (tiles, C), coordinates (tiles, 2), with or without a batch dim of 1. Pickled objects are never loaded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.weights import first_line, load_tensors
from .embeddings import TILE_SIZE, Keys, positive

SUFFIXES = (".h5", ".hdf5", ".npz", ".pt", ".pth")


class Slide:
    """An open file: `num_tiles`, `stated` (the tile size, as in `SlideEntry`), `coords` (tiles, 2), and the features.
    Raises ValueError if an array is missing, or if the arrays do not fit together."""

    def __init__(self, arrays: Mapping[str, Any], stated: Mapping[str, Any], keys: Keys) -> None:
        self._features, self.features_key = _array(arrays, "features", keys.features)
        coords, coords_key = _array(arrays, "coordinates", keys.coords)
        if coords.shape[-1] != 2:
            raise ValueError(f"{coords_key} has shape {tuple(coords.shape)}, not (tiles, 2): x and y of each tile")
        self.num_tiles = self._features.shape[-2]
        if coords.shape[-2] != self.num_tiles:
            sizes = f"{self.features_key} has {self.num_tiles} tiles and {coords_key} has {coords.shape[-2]}"
            raise ValueError(f"{sizes}: one line of each belongs to a tile")
        self.coords = _tensor(coords[...], coords_key).reshape(-1, 2)
        if self.coords.is_floating_point() and self.coords.dtype.itemsize < 4:
            dtype = self.coords.dtype
            raise ValueError(f"{coords_key} has dtype {dtype}, too coarse for pixels: save integers or float32")
        # Only the arrays of an HDF5 file have attributes.
        size = stated.get(TILE_SIZE, getattr(coords, "attrs", {}).get(TILE_SIZE))
        self.stated = None if size is None else positive(size) or repr(size)

    def features(self, start: int, stop: int) -> Tensor:
        """Features (stop - start, C) of some tiles. From an HDF5 file only these are read."""
        rows = self._features[0, start:stop] if len(self._features.shape) == 3 else self._features[start:stop]
        found = _tensor(rows, self.features_key)
        return found.clone() if stop - start < self.num_tiles else found  # a view would keep all rows in memory


def _tensor(x: Any, name: str) -> Tensor:
    """A file's array as a tensor in this machine's byte order."""
    is_real = not (x.is_complex() or x.dtype == torch.bool) if isinstance(x, Tensor) else x.dtype.kind in "iuf"
    if not is_real or x.dtype.itemsize > 8:
        raise ValueError(f"{name} has dtype {x.dtype}, not real numbers of at most 64 bits")
    return x if isinstance(x, Tensor) else torch.as_tensor(x.astype(x.dtype.newbyteorder("="), copy=False))


def _array(arrays: Mapping[str, Any], what: str, names: tuple[str, ...]) -> tuple[Any, str]:
    name = next((name for name in names if name in arrays), None)
    if name is None:
        there, wanted = ", ".join(map(str, arrays)) or "no arrays", " and ".join(names)
        raise ValueError(f"holds no {what}: it has {there}, and {wanted} were looked for (--keys names others)")
    array = arrays[name]
    if isinstance(array, Tensor) and (array.layout != torch.strided or array.is_meta or array.is_quantized):
        raise ValueError(f"{name} is {array.layout} {array.dtype} on {array.device}: save a plain dense tensor")
    shape = tuple(getattr(array, "shape", None) or ())  # an empty HDF5 data set's is None
    if len(shape) == 2 or (len(shape) == 3 and shape[0] == 1):
        return array, name
    raise ValueError(f"{name} has shape {shape}, not (tiles, ...): {what} of the tiles of one slide")


@contextmanager
def open_slide(path: Path, keys: Keys) -> Iterator[Slide]:
    """A context in which a slide's file is open. If it cannot be read, a ValueError says why, without the path."""
    try:
        if path.suffix not in (".h5", ".hdf5"):
            loaded = _load(path)
            yield Slide({name: x for name, x in loaded.items() if getattr(x, "ndim", 0)}, loaded, keys)
            return
        import h5py

        with h5py.File(path, "r") as file:
            arrays = {name: x for name, x in file.items() if isinstance(x, h5py.Dataset)}
            yield Slide(arrays, dict(file.attrs), keys)
    except ValueError:
        raise
    except Exception as error:  # a damaged file raises anything, and HDF5 only once its features are read
        raise ValueError(f"cannot be read: {first_line(error)}") from error


def _load(path: Path) -> dict[str, Any]:
    """What an npz or pt file holds, by name."""
    try:
        if path.suffix == ".npz":
            import numpy

            with numpy.load(path, allow_pickle=False) as file:
                return dict(file)
        loaded = load_tensors(path, is_mapped=True)
    except Exception as error:  # a damaged file raises anything
        raise ValueError(f"cannot be read as {path.suffix[1:]}: {first_line(error)}") from error
    if isinstance(loaded, Tensor):
        raise ValueError("holds a tensor alone, and no coordinates: save {'features': ..., 'coords': ...}")
    if not isinstance(loaded, dict):
        raise ValueError(f"holds a {type(loaded).__name__}, not a dict of tensors")
    return loaded


def find_slides(paths: list[Path]) -> dict[str, Path]:
    """Slides by the file's name without its suffix. A folder stands for its slides. ValueError refuses bad names."""
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no {path}")
        files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"the folder {path} holds no slides: files that end in {', '.join(SUFFIXES)}")
        for file in files:
            if file.suffix not in SUFFIXES:
                raise ValueError(f"{file} does not end in one of {', '.join(SUFFIXES)}")
            # A name that is not UTF-8 reaches Python with lone surrogates.
            if file.stem == "__metadata__" or any("\ud800" <= letter <= "\udfff" for letter in file.stem):
                raise ValueError(f"{str(file)!r}: safetensors has no place for a slide of this name: rename it")
            other = found.setdefault(file.stem, file)
            if other != file:
                raise ValueError(f"{other} and {file} would both be called {file.stem!r}: rename one")
    return found

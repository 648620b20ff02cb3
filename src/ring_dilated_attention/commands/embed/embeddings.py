"""The file of `rda embed`: a tensor for each slide, with the settings as metadata; and the same as a table (CSV).

A new version is written beside the file and then replaces it. Only the same settings may add to it.
"""

import csv
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...training.files import check_mine, replaced, write_whole

if TYPE_CHECKING:
    from torch import Tensor

MADE_BY = "rda embed"
TILE_SIZE = "patch_size_level0"  # TRIDENT's name for the distance from one tile to the next, in coordinates' units
SECONDS_BETWEEN_WRITES = 5.0  # to write a file of many slides again for each new slide takes long


class Keys(NamedTuple):
    """The names under which a slide's file may hold its arrays, the first choice first."""

    features: tuple[str, ...] = ("features", "tile_embeds", "feats")
    coords: tuple[str, ...] = ("coords", "coordinates")


class SlideEntry(NamedTuple):
    """What an embedding file states about a slide."""

    fingerprint: str  # of the slide's file
    num_tiles: int
    tile_size: float
    stated: float | str | None = None  # what the slide's file states as tile size; a repr if that is no size


class TileSizes(NamedTuple):
    """A file that states no tile size gets `otherwise`. If this is None, such files are refused. What a file states is
    "taken", "overruled" by `otherwise`, or "compared": refused unless it is `otherwise`."""

    otherwise: float | None
    stated: str

    @classmethod
    def parse(cls, option: str | None) -> "TileSizes":
        """The rule of --tile-size. `option` is what the user wrote: "512", "file" or "file:512", or None."""
        if option is None or option == "file":
            return cls(256.0, "compared") if option is None else cls(None, "taken")
        number = positive(option.removeprefix("file:"))
        if number is None:
            raise ValueError(f"--tile-size {option} is neither a positive number of pixels, nor file, nor file:PIXELS")
        return cls(number, "taken" if option.startswith("file:") else "overruled")

    def of(self, stated: float | str | None) -> float:
        """The tile size for a file, by what it states, as in `SlideEntry`. Raises ValueError if the file is refused."""
        size = self.otherwise if stated is None or self.stated == "overruled" else stated
        if isinstance(size, str):
            remedy = "correct the file, or pass --tile-size 256 (or what is right), which takes no account of it"
            raise ValueError(f"states {TILE_SIZE}={size}, which is no positive number of pixels: {remedy}")
        if size is None or (self.stated == "compared" and size != self.otherwise):
            said = f"no {TILE_SIZE}" if size is None else f"{TILE_SIZE}={str(size).removesuffix('.0')}"
            remedy = "--tile-size 256 always takes 256 (as GigaPath does), file:256 takes what is stated or else 256"
            raise ValueError(f"states {said}, the step from tile to tile: {remedy}")
        return size


def positive(value: Any) -> float | None:
    """The positive finite number that a text, a number or a one-element array states; None if it states none."""
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < math.inf else None


def digest_of(path: Path) -> str:
    """The SHA-256 of a whole file. Raises ValueError if the file cannot be read, or is no regular file."""
    if path.exists() and not path.is_file():
        raise ValueError("is no regular file: a pipe or a device may have no end")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error


def fingerprint(path: Path, keys: Keys) -> str:
    """A hash that identifies a slide's file. It covers the names of the arrays that are read, too."""
    return hashlib.sha256(json.dumps([digest_of(path), *keys]).encode()).hexdigest()


class EmbeddingFile:
    """A safetensors file of slide embeddings. A ValueError refuses another program's, or one of other settings."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, dict(settings)
        self.place = Path(os.path.realpath(path))  # if the path is a symbolic link, its target is written, and it stays
        self.embeddings: dict[str, Tensor] = {}
        self.entries: dict[str, SlideEntry] = {}
        self._written, self._is_new = time.monotonic(), False
        self._read()

    def _refusal(self, why: str, *remedies: str) -> ValueError:
        return ValueError(f"--out {self.path} {why}. {', '.join(('Choose another name', *remedies))}.")

    def _read(self) -> None:
        """Read the embeddings that this process does not have yet. The file may not exist."""
        try:
            self.path.stat()
        except FileNotFoundError:
            return
        if not self.path.is_file():
            raise self._refusal("is there, and is no regular file")
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                names = file.keys() if metadata.get("made_by") == MADE_BY else []
                self.embeddings |= {name: file.get_tensor(name) for name in names if name not in self.embeddings}
        except (OSError, SafetensorError) as error:
            raise self._refusal(f"is there and cannot be read: {error}") from error
        if metadata.get("made_by") != MADE_BY:
            raise self._refusal(f"is there, and `{MADE_BY}` did not make it")
        try:
            settings = dict(json.loads(metadata["settings"]).items())
            found = {name: SlideEntry(*entry) for name, entry in json.loads(metadata["slides"]).items()}
            if "file" in (sizes := {settings.get("tile_size"), self.settings.get("tile_size")}):
                # The number is for files that state no tile size. With "file" those are refused: any number will do.
                settings["tile_size"] = self.settings["tile_size"] = next(iter(sizes - {"file"}), "file")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise self._refusal("is there, and what it says of itself cannot be read") from error
        for name in sorted(self.settings.keys() | settings.keys()):
            theirs, ours = settings.get(name), self.settings.get(name)
            if theirs != ours:
                made = f"holds embeddings made with {name}={theirs!r}, not {ours!r}"
                raise self._refusal(made, "or the settings that it was made with")
        self.entries = {name: entry for name, entry in found.items() if name in self.embeddings} | self.entries

    def has(self, name: str, path: Path, keys: Keys, tile_sizes: TileSizes) -> bool:
        """Whether the file has this slide. A ValueError if it has another of that name, or another tile size."""
        if name not in self.entries:
            return False
        there, entry = f"the slide {name!r} is in {self.path} already, made", self.entries[name]
        if entry.fingerprint != fingerprint(path, keys):
            there += f" from another file than {path}"
            raise ValueError(f"{there}, or from other arrays in it: rename this one, or choose another --out")
        if (size := tile_sizes.of(entry.stated)) != entry.tile_size:
            raise ValueError(f"{there} with tile size {entry.tile_size:g}, not {size:g}: choose another --out")
        return True

    def add(self, name: str, embedding: Sequence[Any], entry: SlideEntry) -> None:
        """embedding: numbers, (E,) or (depth + 1, E)."""
        import torch

        dtype = torch.float64 if self.settings["dtype"] == "float64" else torch.float32
        self.embeddings[name] = torch.tensor(embedding, dtype=dtype)
        self.entries[name] = entry
        self._is_new = True
        if time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """Write the file, if there is anything new."""
        if not self._is_new:
            return
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self._read()  # another process may have written to the file since
        metadata = {"made_by": MADE_BY, "embedding": self.settings["embedding"]}
        metadata |= {"settings": json.dumps(self.settings), "slides": json.dumps(self.entries)}
        self.place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replaced(self.place) as unfinished:
                save_file(self.embeddings, unfinished, metadata=metadata)
        except SafetensorError as error:  # as for a full disk
            raise ValueError(f"--out {self.path} cannot be written: {error}") from error
        self._written, self._is_new = time.monotonic(), False

    def write_table(self, path: Path) -> None:
        """Write a line for each slide or layer. A ValueError refuses a file that has other lines than this table."""
        text, settings = StringIO(), self.settings
        lines = csv.writer(text, lineterminator="\n")
        digits = 17 if settings["dtype"] == "float64" else 9  # enough to read the same numbers again
        for name, entry in sorted(self.entries.items()):
            layers = self.embeddings[name].reshape(-1, self.embeddings[name].shape[-1]).tolist()
            if not text.tell():
                about = ["slide", "embedding", "layer", "num_tiles", "tile_size", "stated_tile_size"]
                lines.writerow(about + [f"e{i}" for i in range(len(layers[0]))])
            for i, numbers in enumerate(layers):
                row = [name, settings["embedding"], i if settings["layer"] == "all" else settings["layer"], *entry[1:]]
                lines.writerow([*row, *(f"{x:.{digits}g}" for x in numbers)])
        content = text.getvalue().encode()
        new = set(content.splitlines())
        owner = (lambda old: new.issuperset(old.read(len(content) + 1).splitlines()), f"`{MADE_BY} --out {self.path}`")
        check_mine(path, *owner)
        if content:
            write_whole(path, content, *owner)

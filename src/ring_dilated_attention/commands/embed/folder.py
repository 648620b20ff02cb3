"""The folder of `rda embed`: NAME.npy for each slide, and settings.json. Only the same settings may add to it."""

import hashlib
import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from ...training.files import json_object, write_whole

MADE_BY = "rda embed"


class EmbeddingFolder:
    """A ValueError refuses a folder of another program, or of other settings. The folder is made with its first
    embedding."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, {"made_by": MADE_BY, **settings}
        if path.exists() and any(path.iterdir()):
            self._compare()

    def _compare(self) -> None:
        try:
            theirs = json_object((self.path / "settings.json").read_bytes())
        except FileNotFoundError:
            theirs = {}
        if theirs.get("made_by") != MADE_BY:
            raise ValueError(
                f"--out {self.path} is no folder of `{MADE_BY}`, and is not empty: choose another --out"
            )
        others = [name for name, ours in self.settings.items() if theirs.get(name) != ours]
        if others:
            made = f"--out {self.path} holds embeddings that were made with another {', '.join(others)}"
            raise ValueError(f"{made}: choose another --out, or the settings in its settings.json")

    def path_of(self, name: str) -> Path:
        return self.path / f"{name}.npy"

    def add(self, name: str, embedding: Any) -> None:
        """Write a slide's embedding, an array of numpy, whole; or leave all as it was."""
        import numpy

        settings = self.path / "settings.json"
        if not settings.exists():
            text = json.dumps(self.settings, indent=1) + "\n"
            write_whole(settings, text.encode(), lambda file: False, f"this run of `{MADE_BY}`")
        content = BytesIO()
        numpy.save(content, embedding)
        write_whole(self.path_of(name), content.getvalue(), lambda file: True, MADE_BY)


def digest_of(path: Path) -> str:
    """The SHA-256 of a whole file. Raises ValueError if the file cannot be read, or is no regular file."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error


def check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise ValueError("is no regular file: a pipe or a device may have no end")

"""The folder that `rda embed` writes: NAME.npy for each slide, and settings.json. All embeddings in it share these
settings."""

import json
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

from ...training.files import write_whole

MADE_BY = "rda embed"


class EmbeddingFolder:
    """The folder that --out names. It is made when its first embedding is added.

    Raises ValueError if another program made the folder, if the folder's embeddings were made with different settings,
    or if nothing can be written to the folder.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        _check_writable(path)  # check this before hours of computing, not after them
        self.path = path
        self.settings_file = path / "settings.json"
        self.settings = json.dumps({"made_by": MADE_BY, **settings}, indent=1).encode()
        if self.settings_file.exists():
            if self.settings_file.read_bytes() != self.settings:
                raise ValueError(
                    f"{self.settings_file} has other settings: choose another --out, or those settings"
                )
        elif path.exists() and any(path.iterdir()):
            raise ValueError(
                f"--out {path} is no folder of `{MADE_BY}`, and is not empty: choose another --out"
            )

    def path_of(self, name: str) -> Path:
        return self.path / f"{name}.npy"

    def add(self, name: str, embedding: Any) -> None:
        """Write a slide's embedding, a numpy array, to NAME.npy. If that fails, no part of the file is left."""
        import numpy

        if not self.settings_file.exists():
            write_whole(self.settings_file, self.settings, lambda file: False, MADE_BY)
        content = BytesIO()
        numpy.save(content, embedding)
        write_whole(self.path_of(name), content.getvalue(), lambda file: True, MADE_BY)


def _check_writable(folder: Path) -> None:
    """Raise ValueError unless new files can be written to a folder. A folder that does not exist yet is not made."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"--out {folder} cannot be written: {error.strerror}. Choose another place."
        ) from error

"""The document of a run: the bytes of its files, one after the other.

The last bytes of the document are held out for scoring. Each step reads windows of the other bytes. This module imports
no torch.
"""

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STDIN = "-"
# Folders in Python's library that the default document leaves out: installed packages, tests, caches.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def read_file(name: str) -> bytes:
    """The bytes of a file, or of stdin. Raises ValueError if the file cannot be read."""
    try:
        if name == STDIN:
            return sys.stdin.buffer.read()
        return Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from error


@dataclass(frozen=True)
class Document:
    """One long document. Its last `num_held_out` bytes are never trained on."""

    content: bytes
    name: str
    seq_len: int
    num_held_out: int

    def __post_init__(self) -> None:
        if not self.content:
            raise ValueError(f"{self.name} is empty: there is nothing to read")
        if len(self.content) < (needed := self.seq_len + self.num_held_out):
            raise ValueError(
                f"{self.name} has {len(self.content):,} bytes, but one sequence to train on and the held-out bytes "
                f"take {self.seq_len:,} + {self.num_held_out:,} = {needed:,}: pass more --data, or a smaller "
                "--held-out-bytes or --seq-len"
            )

    @property
    def num_train(self) -> int:
        return len(self.content) - self.num_held_out

    def identity(self) -> dict[str, Any]:
        """The name, the sizes and the sha256 of the document. In a resumed run the sha256 must be the same."""
        return {
            "name": self.name,
            "num_bytes": len(self.content),
            "num_held_out": self.num_held_out,
            "sha256": hashlib.sha256(self.content).hexdigest(),
        }

    def train_windows(self, seed: int, step: int, length: int, number: int) -> bytearray:
        """The bytes of the windows that a step reads: `number` windows of `length` bytes, one after the other.

        The windows depend only on the arguments and the document, so a resumed run reads the same windows.
        """
        windows, view = bytearray(), memoryview(self.content)
        for i in range(number):
            digest = hashlib.blake2b(f"{seed} {step} {i}".encode(), digest_size=16).digest()
            start = int.from_bytes(digest, "big") % (self.num_train - length + 1)
            windows += view[start : start + length]
        return windows


def load_document(data: Sequence[str], seq_len: int, num_held_out: int) -> Document:
    """The document made of the files `data`, or of the standard library's source if `data` is empty.

    Raises ValueError if a file cannot be read, or if the files are too short.
    """
    name, files = ", ".join(data), list(data)
    if not data:
        root = Path(sysconfig.get_path("stdlib"))
        name = f"Python's standard library ({root})"
        sources = source_files(path.relative_to(root) for path in root.rglob("*.py"))
        files = [str(root / path) for path in sources]
    return Document(b"".join(map(read_file, files)), name, seq_len, num_held_out)


def source_files(paths: Iterable[Path]) -> list[Path]:
    """The paths outside SKIPPED_FOLDERS, in an order that does not depend on the file system."""
    return sorted(
        (path for path in paths if not SKIPPED_FOLDERS & set(path.parts)), key=Path.as_posix
    )

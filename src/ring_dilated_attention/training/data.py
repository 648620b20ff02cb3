"""The document: its bytes, the part that is held out, and the windows that a step reads. The file imports no torch."""

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .reading import read_files

# Installed packages, tests (many are data) and caches are not the language's own source.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """One long document. Its last `num_held_out` bytes are never trained on."""

    content: bytes
    name: str
    seq_len: int
    num_held_out: int
    read: str = ""  # says which files were read, and how

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
        """What must be the same in the document of a resumed run."""
        digest = hashlib.sha256(self.content).hexdigest()
        sizes = {"num_bytes": len(self.content), "num_held_out": self.num_held_out}
        return {"name": self.name, **sizes, "sha256": digest, "read": self.read}

    def train_windows(self, seed: int, step: int, length: int, number: int) -> bytearray:
        """The windows of a step, joined. They depend on the arguments alone: a resumed run reads the same windows."""
        windows, view = bytearray(), memoryview(self.content)
        for i in range(number):
            digest = hashlib.blake2b(f"{seed} {step} {i}".encode(), digest_size=16).digest()
            start = int.from_bytes(digest, "big") % (self.num_train - length + 1)
            windows += view[start : start + length]
        return windows


def load_document(
    data: Sequence[str], seq_len: int, num_held_out: int, how: Mapping[str, Any], held_out: Sequence[str] = ()
) -> Document:
    """Concatenate the files, or the standard library's source if none is given. Bad files are a ValueError.

    Held out are the last bytes, or the first ones of `held_out` files. `how` is as for `reading.Text`.
    """
    name, paths, root = ", ".join(data), [Path(name) for name in data], Path(sysconfig.get_path("stdlib"))
    if not data:
        name = f"Python's standard library ({root})"
        paths = [root / path for path in source_files(path.relative_to(root) for path in root.rglob("*.py"))]
    content, read = read_files(paths, how)
    if held_out:
        scored, read_too = read_files([Path(name) for name in held_out], how)
        if not (scored := scored[:num_held_out]):
            raise ValueError(f"--held-out {', '.join(held_out)} is empty: there is nothing to score")
        if scored in content:  # also where another file holds them, or a compressed one
            raise ValueError(f"--held-out {', '.join(held_out)} is trained on, as --data: give a text that is not")
        name, num_held_out = f"{name}; held out: {', '.join(held_out)}", len(scored)
        content, read = content + scored, f"{read}\nheld out, the first {num_held_out:,} bytes of\n  {read_too}"
    return Document(content, name, seq_len, num_held_out, read)


def source_files(paths: Iterable[Path]) -> list[Path]:
    """The paths outside the skipped folders, in an order that does not depend on the file system."""
    return sorted((path for path in paths if not SKIPPED_FOLDERS & set(path.parts)), key=Path.as_posix)


def cut_into_contexts(blocks: Iterable[bytes], size: int, context: int | None) -> Iterator[tuple[int, bytes]]:
    """Up to `size` bytes at a time, with their position in their context. A `context` of None is the whole text."""
    position, held, length = 0, bytearray(), context or sys.maxsize
    for block in blocks:
        held += block
        while len(held) >= (wanted := min(size, length - position)):
            yield position, bytes(held[:wanted])
            del held[:wanted]
            position = (position + wanted) % length
    if held:
        yield position, bytes(held)

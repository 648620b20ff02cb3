"""The document: its bytes, the part that is held out, and the window that a step reads. The file imports no torch."""

import gzip
import hashlib
import math
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
    """One long document. Its last `num_held_out` windows of `seq_len` bytes are never trained on."""

    content: bytes
    name: str
    seq_len: int
    num_held_out: int
    read: str = ""  # says which files were read, and how

    def __post_init__(self) -> None:
        needed = self.seq_len * (1 + self.num_held_out)
        if not self.content:
            raise ValueError(f"{self.name} is empty: there is nothing to read")
        if len(self.content) < needed:
            longest = len(self.content) // (1 + self.num_held_out)
            remedy = f"or a --seq-len of at most {longest:,}" if longest > 1 else "or fewer --held-out-windows"
            raise ValueError(
                f"{self.name} has {len(self.content):,} bytes, but one sequence to train on and {self.num_held_out} "
                f"held out take {1 + self.num_held_out} * {self.seq_len:,} = {needed:,}: pass more --data, {remedy}"
            )

    @property
    def num_train(self) -> int:
        return len(self.content) - self.num_held_out * self.seq_len

    def identity(self) -> dict[str, Any]:
        """What must be the same in the document of a resumed run."""
        digest = hashlib.sha256(self.content).hexdigest()
        return {"name": self.name, "num_bytes": len(self.content), "sha256": digest, "read": self.read}

    def train_window(self, seed: int, step: int) -> bytearray:
        """The sequence of a step. It depends on (seed, step) alone, so that a resumed run reads the same sequences."""
        digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=16).digest()
        start = int.from_bytes(digest, "big") % (self.num_train - self.seq_len + 1)
        return self._window(start)

    def held_out_window(self, index: int) -> bytearray:
        return self._window(self.num_train + index * self.seq_len)

    def _window(self, start: int) -> bytearray:
        return bytearray(memoryview(self.content)[start : start + self.seq_len])


def load_document(data: Sequence[str], seq_len: int, num_held_out: int, how: Mapping[str, Any]) -> Document:
    """Concatenate the files, or the standard library's source if no file is given. `how`: as for `reading.Text`. Bad
    files are a ValueError."""
    name, paths, root = ", ".join(data), [Path(name) for name in data], Path(sysconfig.get_path("stdlib"))
    if not data:
        name = f"Python's standard library ({root})"
        paths = [root / path for path in source_files(path.relative_to(root) for path in root.rglob("*.py"))]
    content, read = read_files(paths, how)
    return Document(content, name, seq_len, num_held_out, read)


def source_files(paths: Iterable[Path]) -> list[Path]:
    """The paths outside the skipped folders, in an order that does not depend on the file system."""
    kept = [path for path in paths if not SKIPPED_FOLDERS & set(path.parts)]
    return sorted(kept, key=lambda path: path.as_posix())


def cut_into_contexts(blocks: Iterable[bytes], size: int, context: int | None) -> Iterator[tuple[int, bytes]]:
    """Up to `size` bytes at a time, each with its position in its context.

    Args:
        context: the length of a context in bytes; None if the whole text is one.
    """
    position, held, length = 0, bytearray(), context or sys.maxsize
    for block in blocks:
        held += block
        while len(held) >= (wanted := min(size, length - position)):
            yield position, bytes(held[:wanted])
            del held[:wanted]
            position = (position + wanted) % length
    if held:
        yield position, bytes(held)


def baselines(document: Document) -> dict[str, float]:
    """Bits per byte of two simple models on the held-out bytes, by name, to compare a loss with.

    gzip sees one window at a time, as the model does, and looks back at most 32 KiB. The unigram model knows only how
    often each byte stands in the training part, plus one.
    """
    import numpy

    windows = [bytes(document.held_out_window(i)) for i in range(document.num_held_out)]
    num_bytes, num_train = document.num_held_out * document.seq_len, document.num_train
    counts = numpy.bincount(numpy.frombuffer(document.content, numpy.uint8, num_train), minlength=256) + 1
    bits = [math.log2(num_train + 256) - math.log2(int(x)) for x in counts]
    return {
        "gzip": 8 * sum(len(gzip.compress(window, 9, mtime=0)) for window in windows) / num_bytes,
        "unigram": sum(bits[byte] for window in windows for byte in window) / num_bytes,
    }

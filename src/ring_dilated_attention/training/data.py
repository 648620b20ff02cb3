"""The document of a run: what its files hold, unpacked. FASTA files give only the letters of their sequences.

A part of it is held out, and each step reads windows of the rest. Files are read a block at a time. Imports no torch.
"""

import bz2
import gzip
import hashlib
import lzma
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .machine import physical_bytes

STDIN, BLOCK, MOST_SAID = "-", 2**16, 4  # bytes read at a time; files that get a line each, at most
FASTA = re.compile(r"\.(fa|fasta|fna|ffn|faa|fas|frn)$")
PACKED = re.compile(r"\.(gz|bgz|bz2|xz)$")
# How a packed file begins, whatever its name, and what unpacks it.
UNPACKERS: dict[bytes, Any] = {
    b"\x1f\x8b\x08": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
# Installed packages, tests (many are data) and caches are not the language's own source.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Text:
    """A file. Its str() says what was read of it so far."""

    def __init__(self, name: str) -> None:
        self.name, self.num_bytes = name, 0
        self.is_fasta = FASTA.search(PACKED.sub("", name.lower())) is not None

    def blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """The bytes of a buffered file, unpacked. For FASTA, known by its name: the letters of its sequences.
        A ValueError refuses damaged files."""
        try:
            unpacked = _unpacked(file)
            blocks = iter(lambda: unpacked.read(BLOCK), b"")
            if self.is_fasta:
                blocks = _letters(blocks)
            for block in blocks:
                self.num_bytes += len(block)
                yield block
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(
                f"{self.name} is damaged or cut short ({error}): fetch it again"
            ) from error

    def __str__(self) -> str:
        name = Path(self.name).name
        if self.is_fasta:
            return f"{name}: FASTA, {self.num_bytes:,} letters"
        return f"{name}: {self.num_bytes:,} bytes"


def _unpacked(file: Any) -> Any:
    """A buffered file, or what is packed in it."""
    start = file.peek(BLOCK)
    for first_bytes, unpack in UNPACKERS.items():
        if start.startswith(first_bytes):
            return unpack(file)
    return file


def _letters(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """What FASTA has outside of header lines, without the ends of lines."""
    at_start, in_header = True, False
    for block in blocks:
        letters = bytearray()
        for line in block.splitlines(keepends=True):
            if at_start:
                in_header = line.startswith((b">", b";"))
            if not in_header:
                letters += b"".join(line.split())
            at_start = line.endswith(b"\n")
        yield bytes(letters)


def opened(name: str) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if name == STDIN else open(name, "rb")


def read_files(paths: Sequence[Path]) -> tuple[bytes, str]:
    """The bytes of files, one after the other, and a text that says what was read. Bad files are a ValueError."""
    content, texts = bytearray(), [Text(str(path)) for path in paths]
    most = physical_bytes() / 2  # the bytes are copied at the end
    for text in texts:
        try:
            with opened(text.name) as file:
                for block in text.blocks(file):
                    content += block
                    if len(content) > most:
                        rule = f"files may have {most:,.0f} bytes in all, half of the memory"
                        raise ValueError(f"{text.name} does not fit: {rule}")
        except OSError as error:
            raise ValueError(f"cannot read {text.name}: {error.strerror}") from error
    if len(texts) <= MOST_SAID:
        return bytes(content), "\n".join(map(str, texts))
    return bytes(content), f"{len(texts):,} files: {len(content):,} bytes"


@dataclass(frozen=True)
class Document:
    """One long document. Its last `num_held_out` bytes are never trained on."""

    content: bytes
    name: str
    seq_len: int
    num_held_out: int
    read: str = ""  # says which files were read

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
        return {
            "name": self.name,
            "num_bytes": len(self.content),
            "num_held_out": self.num_held_out,
            "sha256": hashlib.sha256(self.content).hexdigest(),
            "read": self.read,
        }

    def train_windows(self, seed: int, step: int, length: int, number: int) -> bytearray:
        """The windows of a step, joined. They depend on the arguments alone: a resumed run reads the same windows."""
        windows, view = bytearray(), memoryview(self.content)
        for i in range(number):
            digest = hashlib.blake2b(f"{seed} {step} {i}".encode(), digest_size=16).digest()
            start = int.from_bytes(digest, "big") % (self.num_train - length + 1)
            windows += view[start : start + length]
        return windows


def load_document(data: Sequence[str], seq_len: int, num_held_out: int) -> Document:
    """Concatenate the files, or the standard library's source if none is given. Bad files are a ValueError."""
    name, paths = ", ".join(data), [Path(file) for file in data]
    if not data:
        root = Path(sysconfig.get_path("stdlib"))
        name = f"Python's standard library ({root})"
        paths = [
            root / path
            for path in source_files(path.relative_to(root) for path in root.rglob("*.py"))
        ]
    content, read = read_files(paths)
    return Document(content, name, seq_len, num_held_out, read)


def source_files(paths: Iterable[Path]) -> list[Path]:
    """The paths outside the skipped folders, in an order that does not depend on the file system."""
    return sorted(
        (path for path in paths if not SKIPPED_FOLDERS & set(path.parts)), key=Path.as_posix
    )


def cut_into_contexts(
    blocks: Iterable[bytes], size: int, context: int | None
) -> Iterator[tuple[int, bytes]]:
    """Up to `size` bytes at a time, with their position in their context. A `context` of None is the whole text."""
    position, waiting, length = 0, bytearray(), context or sys.maxsize
    for block in blocks:
        waiting += block
        while len(waiting) >= (wanted := min(size, length - position)):
            yield position, bytes(waiting[:wanted])
            del waiting[:wanted]
            position = (position + wanted) % length
    if waiting:
        yield position, bytes(waiting)

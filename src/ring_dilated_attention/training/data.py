"""The document: bytes, a part to train on and a part held out, and which window a step reads. No torch."""

import hashlib
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

FASTA_SUFFIXES = (".fa", ".fasta")
BLOCK = 2**16  # bytes of a file at a time
# Not the language's own source: installed packages, tests (many are data) and caches.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """One long document. Its last `num_held_out` windows of `seq_len` bytes are never trained on."""

    content: bytes
    name: str
    seq_len: int
    num_held_out: int

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

    def fingerprint(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def train_window(self, seed: int, step: int) -> bytearray:
        """The sequence of a step: a function of (seed, step) alone, so that a resumed run reads what it would have."""
        digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=16).digest()
        start = int.from_bytes(digest, "big") % (self.num_train - self.seq_len + 1)
        return self._window(start)

    def held_out_window(self, index: int) -> bytearray:
        return self._window(self.num_train + index * self.seq_len)

    def _window(self, start: int) -> bytearray:
        return bytearray(memoryview(self.content)[start : start + self.seq_len])


def load_document(data: Sequence[str], seq_len: int, num_held_out: int) -> Document:
    """Concatenate the files, or the standard library's source if there are none.

    Raises:
        ValueError: if a file cannot be read, or the document is empty or too short.
    """
    if data:
        return Document(b"".join(map(_read_file, map(Path, data))), ", ".join(data), seq_len, num_held_out)
    root = Path(sysconfig.get_path("stdlib"))
    content = b"".join(
        _read(root / path) for path in source_files(path.relative_to(root) for path in root.rglob("*.py"))
    )
    return Document(content, f"Python's standard library ({root})", seq_len, num_held_out)


def source_files(paths: Iterable[Path]) -> list[Path]:
    """Those outside the skipped folders, in an order that no file system decides."""
    kept = [path for path in paths if not SKIPPED_FOLDERS & set(path.parts)]
    return sorted(kept, key=lambda path: path.as_posix())


def strip_fasta(content: bytes) -> bytes:
    """The sequence letters of a FASTA file: no header lines, no line ends."""
    return re.sub(rb"\s+", b"", re.sub(rb"^[>;].*$", b"", content, flags=re.MULTILINE))


def _read_file(path: Path) -> bytes:
    content = _read(path)
    return strip_fasta(content) if path.suffix.lower() in FASTA_SUFFIXES else content


def _read(path: Path) -> bytes:
    try:
        if stat.S_ISCHR(path.stat().st_mode):
            raise ValueError(f"cannot read {path}: it is a device, which may have no end")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


# The same a piece at a time, in constant memory, of a file of any size.


def blocks_of(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        yield block


def without_headers(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The sequence letters of a FASTA file, as `strip_fasta`, also of one without line ends."""
    at_start, in_header = True, False
    for block in blocks:
        letters = []
        for line in block.splitlines(keepends=True):
            in_header = in_header or (at_start and line[:1] in (b">", b";"))
            at_start = line.endswith(b"\n")
            if not in_header:
                letters.append(b"".join(line.split()))
            in_header = in_header and not at_start
        yield b"".join(letters)


def pieces(blocks: Iterable[bytes], chunk: int, context: int | None) -> Iterator[tuple[int, bytes]]:
    """Up to `chunk` bytes at a time, each with its position in its context: the bytes are cut into contexts of so many,
    or are one."""
    position, held = 0, bytearray()
    for block in blocks:
        held += block
        while held:
            size = chunk if context is None else min(chunk, context - position)
            if len(held) < size:
                break
            yield position, bytes(held[:size])
            del held[:size]
            position = (position + size) if context is None else (position + size) % context
    if held:
        yield position, bytes(held)

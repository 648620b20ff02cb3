"""The document of a run: what its files hold, unpacked. FASTA files give only the letters of their sequences.

A part of it is held out, and each step reads windows of the rest. Files are read a block at a time. Imports no torch.
"""

import bz2
import gzip
import hashlib
import lzma
import re
import stat
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .machine import physical_bytes

STDIN, BLOCK, MOST_SAID = "-", 2**16, 4  # bytes read at a time; files that get a line each, at most
FASTA = re.compile(r"\.(fa|fasta|fna|ffn|faa|fas|frn)$")
# How FASTA begins under another name: header or comment lines, then a line of letters alone.
LIKE_FASTA = re.compile(rb"([>;][^\n]*\n)+[A-Za-z*-]+\r?(\n|\Z)")
PACKED = re.compile(r"\.(gz|bgz|bz2|xz)$")
# How files begin whose bytes are no text.
CONTAINER = re.compile(
    rb"(?P<gzip>\x1f\x8b\x08)|(?P<bzip2>BZh[1-9]1AY&SY)|(?P<xz>\xfd7zXZ\0)|(?P<zip>PK\x03\x04)|(?P<zstd>\x28\xb5\x2f\xfd)"
    rb"|(?P<lz4>\x04\x22\x4d\x18)|(?P<rar>Rar!\x1a\x07)|(?P<sevenzip>7z\xbc\xaf)|(?P<tar>.{257}ustar)|(?P<PDF>%PDF-)"
    rb"|(?P<BAM>BAM\x01)|(?P<CRAM>CRAM[\x02\x03])|(?P<twobit>\x43\x27\x41\x1a)|(?P<Parquet>PAR1\x15)|(?P<HDF5>\x89HDF)",
    re.DOTALL,
)
OPEN: dict[str, Any] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
# Installed packages, tests (many are data) and caches are not the language's own source.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Text:
    """A file. Its str() says what was read of it so far. It yields and counts at most `most` bytes. Records
    without letters are not counted. how: the "fasta_case" and "fasta_records" of a run; older runs lack them."""

    def __init__(self, name: str, how: Mapping[str, Any], most: int = sys.maxsize) -> None:
        self.name, self.most, self.num_bytes, self.packing = name, most, 0, ""
        self.num_records, self.num_letters, self.letters, self.seems_fasta = 0, 0, b"", False
        self.border = b"\n" if how.get("fasta_records") == "newline" else b""
        self.is_upper = how.get("fasta_case") == "upper"
        inner = PACKED.sub("", name.lower())
        self.is_fasta = FASTA.search(inner) is not None
        if inner.endswith((".fastq", ".fq")):
            raise ValueError(f"{name} is FASTQ, reads with qualities: make FASTA of it with seqtk seq -A")

    def blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """The bytes of a buffered file, unpacked. For FASTA, known by its name: the letters of its sequences.
        A ValueError refuses damaged files, other containers, and FASTA without letters."""
        try:
            whole = self._opened(file)
            # A block of FASTA yields at most as many bytes as it has, and a border: `given` never cuts off a letter.
            blocks = iter(lambda: whole.read(min(BLOCK, self.most - self.num_bytes)), b"")
            for block in self._of_sequences(blocks) if self.is_fasta else blocks:
                if self.num_bytes == 0 and not self.is_fasta:
                    self.seems_fasta = LIKE_FASTA.match(block) is not None
                given = block[: self.most - self.num_bytes]
                self.num_bytes += len(given)
                yield given
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(f"{self.name} is damaged or cut short ({error}): fetch it again") from error
        if self.is_fasta and not self.num_letters:
            raise ValueError(f"{self.name} is FASTA without letters: there is nothing to read")

    def _opened(self, file: Any) -> Any:
        """The file, or what is packed in it."""
        if (found := CONTAINER.match(file.peek(BLOCK))) is None:
            return file
        kind = str(found.lastgroup)
        if kind not in OPEN or self.packing:
            inside = f" inside {self.packing}" if self.packing else ""
            raise ValueError(f"{self.name} is {kind}{inside}, whose bytes are no text: give the text that is in it")
        self.packing = kind
        return self._opened(OPEN[kind](file))

    def _of_sequences(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """The letters of a FASTA file, without header lines. A border is put after each record that has letters."""
        at_start, in_header, is_open = True, False, False
        for block in blocks:
            found = []
            for line in block.splitlines(keepends=True):
                if at_start and line[:1] in (b">", b";"):
                    in_header = True
                    if line[:1] == b">":
                        found.append(self.border * is_open)
                        is_open = False
                elif not in_header and (letters := b"".join(line.split())):
                    found.append(letters)
                    self.num_letters += len(letters)
                    self.num_records += not is_open
                    is_open = True
                at_start = line.endswith(b"\n")
                in_header = in_header and not at_start
            joined = b"".join(found).upper() if self.is_upper else b"".join(found)
            self.letters = bytes(sorted({*self.letters, *joined.translate(None, self.letters + self.border)}))
            yield joined
        yield self.border * is_open

    def __str__(self) -> str:
        said = f"{Path(self.name).name}: {self.packing}{', ' * bool(self.packing)}"
        if not self.is_fasta:
            hint = "\n  begins as FASTA does, but its name does not end in .fa: read as text" * self.seems_fasta
            return f"{said}{self.num_bytes:,} bytes{hint}"
        records = f"{self.num_records:,} record{'s' * (self.num_records != 1)}"
        return f"{said}FASTA, {records}, {self.num_letters:,} letters ({_shown(self.letters)})"


def _shown(letters: bytes) -> str:
    text = ascii(letters.decode("latin-1"))[1:-1]
    return text if len(text) <= 80 else f"{text[:77]}..."


def opened(name: str) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if name == STDIN else open(name, "rb")


def read_files(paths: Sequence[Path], how: Mapping[str, Any]) -> tuple[bytes, str]:
    """The bytes of files, one after the other, and a text that says what was read. Bad files are a ValueError."""
    content, read = bytearray(), [Text(str(path), how) for path in paths]
    most = physical_bytes() / 2  # the bytes are copied at the end
    for path, text in zip(paths, read, strict=True):
        try:
            if text.name != STDIN and stat.S_ISCHR(path.stat().st_mode):
                raise ValueError(f"cannot read {path}: it is a device, which may have no end")
            with opened(text.name) as file:
                for block in text.blocks(file):
                    content += block
                    if len(content) > most:
                        rule = f"files may have {most:,.0f} bytes in all, half of the memory"
                        raise ValueError(f"{path} does not fit: {rule}")
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if len(read) <= MOST_SAID:
        return bytes(content), "\n".join(map(str, read))
    said = f"{len(read):,} files: {len(content):,} bytes"
    for kind, number in sorted(Counter(text.packing for text in read if text.packing).items()):
        said += f"; {number:,} of them packed by {kind}"
    if fasta := [text for text in read if text.is_fasta]:
        letters = bytes(sorted({letter for text in fasta for letter in text.letters}))
        number = sum(text.num_records for text in fasta)
        said += f"; {len(fasta):,} of them are FASTA, with {number:,} records ({_shown(letters)})"
    if number := sum(text.seems_fasta for text in read):
        said += f"\n  {number:,} of them begin as FASTA does, but are not named .fa: read as text"
    return bytes(content), said


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

    The last bytes are held out, or the first ones of `held_out` files. `how` is as for `Text`.
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
        if scored in content:  # the same bytes may stand in another file, or in a compressed one
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

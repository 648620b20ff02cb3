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
            raise ValueError(
                f"{name} is FASTQ, reads with qualities: make FASTA of it with seqtk seq -A"
            )

    def blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """The bytes of a buffered file, unpacked. For FASTA, known by its name: the letters of its sequences.
        A ValueError refuses damaged files, other containers, and FASTA without letters."""
        try:
            unpacked = self._opened(file)
            # A block of FASTA yields at most as many bytes as it has, and a border: no letter is ever cut off.
            blocks = iter(lambda: unpacked.read(min(BLOCK, self.most - self.num_bytes)), b"")
            if self.is_fasta:
                blocks = self._of_sequences(blocks)
            for block in blocks:
                if self.num_bytes == 0 and not self.is_fasta:
                    self.seems_fasta = LIKE_FASTA.match(block) is not None
                block = block[: self.most - self.num_bytes]
                self.num_bytes += len(block)
                yield block
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(
                f"{self.name} is damaged or cut short ({error}): fetch it again"
            ) from error
        if self.is_fasta and not self.num_letters:
            raise ValueError(f"{self.name} is FASTA without letters: there is nothing to read")

    def _opened(self, file: Any) -> Any:
        """The file, or what is packed in it."""
        container = CONTAINER.match(file.peek(BLOCK))
        if container is None:
            return file
        kind = str(container.lastgroup)
        if kind not in OPEN or self.packing:
            inside = f" inside {self.packing}" if self.packing else ""
            raise ValueError(
                f"{self.name} is {kind}{inside}, whose bytes are no text: give the text that is in it"
            )
        self.packing = kind
        return self._opened(OPEN[kind](file))

    def _of_sequences(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """The letters of a FASTA file, without header lines. A border is put after each record that has letters."""
        at_start, in_header, has_letters = True, False, False
        for block in blocks:
            sequences = bytearray()
            for line in block.splitlines(keepends=True):
                if at_start and line[:1] in (b">", b";"):
                    in_header = True
                    if line[:1] == b">" and has_letters:
                        sequences += self.border
                        has_letters = False
                elif not in_header:
                    letters = b"".join(line.split())
                    if letters and not has_letters:
                        self.num_records += 1
                        has_letters = True
                    self.num_letters += len(letters)
                    sequences += letters
                at_start = line.endswith(b"\n")
                in_header = in_header and not at_start
            if self.is_upper:
                sequences = sequences.upper()
            self.letters = bytes(
                sorted({*self.letters, *sequences.translate(None, self.letters + self.border)})
            )
            yield bytes(sequences)
        if has_letters:
            yield self.border

    def __str__(self) -> str:
        words = f"{Path(self.name).name}: "
        if self.packing:
            words += f"{self.packing}, "
        if self.is_fasta:
            records = "1 record" if self.num_records == 1 else f"{self.num_records:,} records"
            return f"{words}FASTA, {records}, {self.num_letters:,} letters ({_shown(self.letters)})"
        words += f"{self.num_bytes:,} bytes"
        if self.seems_fasta:
            words += "\n  begins as FASTA does, but its name does not end in .fa: read as text"
        return words


def _shown(letters: bytes) -> str:
    text = ascii(letters.decode("latin-1"))[1:-1]
    return text if len(text) <= 80 else f"{text[:77]}..."


def opened(name: str) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if name == STDIN else open(name, "rb")


def read_files(paths: Sequence[Path], how: Mapping[str, Any]) -> tuple[bytes, str]:
    """The bytes of files, one after the other, and a text that says what was read. Bad files are a ValueError."""
    content, texts = bytearray(), [Text(str(path), how) for path in paths]
    most = physical_bytes() / 2  # the bytes are copied at the end
    for path, text in zip(paths, texts, strict=True):
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
    if len(texts) <= MOST_SAID:
        return bytes(content), "\n".join(map(str, texts))
    return bytes(content), _words_of_many(texts, len(content))


def _words_of_many(texts: Sequence[Text], num_bytes: int) -> str:
    words = f"{len(texts):,} files: {num_bytes:,} bytes"
    for kind, number in sorted(Counter(text.packing for text in texts if text.packing).items()):
        words += f"; {number:,} of them packed by {kind}"
    fasta = [text for text in texts if text.is_fasta]
    if fasta:
        letters = bytes(sorted({letter for text in fasta for letter in text.letters}))
        number = sum(text.num_records for text in fasta)
        words += f"; {len(fasta):,} of them are FASTA, with {number:,} records ({_shown(letters)})"
    number = sum(text.seems_fasta for text in texts)
    if number:
        words += f"\n  {number:,} of them begin as FASTA does, but are not named .fa: read as text"
    return words


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


def load_document(
    data: Sequence[str],
    seq_len: int,
    num_held_out: int,
    how: Mapping[str, Any],
    held_out: Sequence[str] = (),
) -> Document:
    """Concatenate the files, or the standard library's source if none is given. Bad files are a ValueError.

    The last bytes are held out, or the first ones of `held_out` files. `how` is as for `Text`.
    """
    name, paths = ", ".join(data), [Path(file) for file in data]
    if not data:
        root = Path(sysconfig.get_path("stdlib"))
        name = f"Python's standard library ({root})"
        paths = [
            root / path
            for path in source_files(path.relative_to(root) for path in root.rglob("*.py"))
        ]
    content, read = read_files(paths, how)
    if held_out:
        option = f"--held-out {', '.join(held_out)}"
        scored, scored_read = read_files([Path(file) for file in held_out], how)
        scored = scored[:num_held_out]
        if not scored:
            raise ValueError(f"{option} is empty: there is nothing to score")
        if scored in content:  # the same bytes may stand in another file, or in a compressed one
            raise ValueError(f"{option} is trained on, as --data: give a text that is not")
        name, num_held_out = f"{name}; held out: {', '.join(held_out)}", len(scored)
        content += scored
        read += f"\nheld out, the first {num_held_out:,} bytes of\n  {scored_read}"
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

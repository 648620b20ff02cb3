"""A file of any size, a piece at a time: what `data.load_document` makes of it, in constant memory. No torch."""

from collections.abc import Iterable, Iterator
from typing import BinaryIO

BLOCK = 2**16


def blocks_of(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        yield block


def without_headers(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The sequence letters of a FASTA file, as `data.strip_fasta`, also of one without line ends."""
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

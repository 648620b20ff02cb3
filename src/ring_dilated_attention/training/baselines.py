"""What simple models reach on the held-out bytes, to compare a loss with. The file imports no torch."""

import gzip
from typing import Any

from .data import Document

SMOOTHING = 2.0  # the weight of p_{n-1} in the formula below, in occurrences of the context
BLOCK = 2**22  # bytes of the training part that are counted at a time


def baselines(document: Document) -> dict[str, float]:
    """Bits per byte on the held-out bytes, by name.

    gzip sees them as one stream, and looks back at most 32 KiB. Bigrams and trigrams are tables of the training part:
    what came after the last byte, or after the last two. A table of n bytes is mixed with that of n - 1,

        p_n(c | context) = (count(context, c) + SMOOTHING * p_{n-1}(c)) / (count(context) + SMOOTHING),

    down to p_0 = 1 / 256.
    """
    import numpy

    content, num_train = numpy.frombuffer(document.content, numpy.uint8), document.num_train
    held_out = memoryview(document.content)[num_train:]
    # Bytes are numbered anew, 0 to A - 1, so that a table of trigrams has A**3 entries and not 256**3.
    is_there = numpy.bincount(content, minlength=256) > 0
    number, alphabet = (numpy.cumsum(is_there) - 1).astype(numpy.int32), int(is_there.sum())

    def codes(start: int, stop: int, order: int) -> Any:
        """For each byte from start to stop the number of the n-gram that ends there."""
        rows = [number[content[start - i : stop - i]] for i in range(order)]
        return sum(row * alphabet**i for i, row in enumerate(rows))

    probability = numpy.full(len(held_out), 1 / 256)
    bits = []
    for order in (1, 2, 3):
        table = numpy.zeros(alphabet**order, numpy.int64)
        for start in range(order - 1, num_train, BLOCK):
            counted = codes(start, min(start + BLOCK, num_train), order)
            table += numpy.bincount(counted, minlength=len(table))
        code = codes(num_train, len(content), order)
        before = table.reshape(-1, alphabet).sum(1)[code // alphabet]
        probability = (table[code] + SMOOTHING * probability) / (before + SMOOTHING)
        bits.append(-float(numpy.log2(probability).mean()))
    packed = 8 * len(gzip.compress(held_out, 9, mtime=0)) / len(held_out)
    return {"gzip": packed, "bigrams": bits[1], "trigrams": bits[2]}

"""What simple models reach on the held-out bytes, so that a loss means something. No torch.

gzip sees one window at a time, as the model does, and looks back 32 KiB at most. The unigram model knows how often each
byte stands in the training part, and nothing else.
"""

import gzip
import math

from .data import Document


def baselines(document: Document) -> dict[str, float]:
    """Bits per byte, by name."""
    windows = [bytes(document.held_out_window(i)) for i in range(document.num_held_out)]
    return {"gzip": gzip_bits_per_byte(windows), "unigram": unigram_bits_per_byte(document, windows)}


def gzip_bits_per_byte(windows: list[bytes]) -> float:
    return 8 * sum(len(gzip.compress(x, 9, mtime=0)) for x in windows) / sum(map(len, windows))


def unigram_bits_per_byte(document: Document, windows: list[bytes]) -> float:
    """Cross-entropy under the frequencies of the training part, each counted once more than it is there."""
    import numpy

    counts = numpy.bincount(numpy.frombuffer(document.content, numpy.uint8, document.num_train), minlength=256) + 1
    bits = [math.log2(document.num_train + 256) - math.log2(int(x)) for x in counts]
    return sum(bits[byte] for window in windows for byte in window) / sum(map(len, windows))


def smoothed(values: list[float]) -> list[float]:
    """The mean of the steps around each, a tenth of all and 51 at most; fewer at the ends."""
    half = min(len(values) // 20, 25)
    found = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        part = values[i - reach : i + reach + 1]
        found.append(sum(part) / len(part))
    return found

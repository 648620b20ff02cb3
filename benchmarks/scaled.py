"""The same call at a size that can be checked densely. Pure integers, no torch."""

from dataclasses import replace

from ring_dilated_attention.pattern import WHOLE_DOCUMENT, DilatedPattern


def scaled_down(pattern: DilatedPattern, seq_len: int, most: int) -> tuple[DilatedPattern, int]:
    """Sequence and segments divided by one number, so that at most about `most` positions remain; rates stay.

    A segment that had a row for every phase keeps one; one that is the whole document remains it.

    Returns:
        The pattern, and its number of positions.
    """
    divisor = -(-seq_len // most)
    lengths = [
        w if w == WHOLE_DOCUMENT else max(1, w // divisor, min(w, r))
        for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
    ]
    return replace(pattern, segment_lengths=lengths), -(-seq_len // divisor)

"""Scales a pattern down to a length at which it can be compared with the definition. Pure integers, no torch."""

from dataclasses import replace

from ring_dilated_attention.pattern import WHOLE_DOCUMENT, DilatedPattern


def scaled_down(pattern: DilatedPattern, seq_len: int, most: int) -> tuple[DilatedPattern, int]:
    """Divide sequence and segments by the same number, so that about `most` positions remain. Dilation rates stay.

    A segment of the whole document stays one. Other segments keep at least as many positions as the rate, if they had
    so many: then each phase (the position modulo the rate) still has a row.

    Returns:
        The pattern, and its number of positions.
    """
    divisor = -(-seq_len // most)
    lengths = [
        w if w == WHOLE_DOCUMENT else max(1, w // divisor, min(w, r))
        for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
    ]
    return replace(pattern, segment_lengths=lengths), -(-seq_len // divisor)

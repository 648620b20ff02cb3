"""Where torchscale pads a sequence with rows of zeros, and how many of these rows a query attends to.

torchscale (microsoft/torchscale, component/dilated_attention.py) takes these steps for a sequence of L positions:

1. Cut the sequence into segments of w = min(segment_length, L) positions.
2. Fill up the last segment to w with zero rows.
3. Fill up every segment to a multiple of the dilation rate r with zero rows.

A head reads every r-th row of a segment, so a query attends to m = ceil(w / r) rows, zero rows included. A zero row has
score 0 and value 0, and takes part in the softmax. (In a causal pattern no query attends to zero rows, because they
come last.)

A branch is called *misaligned* here if r does not divide w and there are several segments. Example: w = 5, r = 2 and
L = 10. Each segment of 5 rows is padded to 6, and torchscale does not remove the padding from the output. So the rows
of the second segment, at positions 5 to 9, come out at 6 to 10. Position 5 gets the output of a zero row, and the row
at 10 is lost, since the output is cut to L rows.

In general segment i comes out i * (m * r - w) positions later. So a misaligned branch is computed as an aligned one,
with segments of m * r rows, over the *padded* rows: the rows of the sequence with the zero rows between them.
"""

from typing import TypeVar

from torch import Tensor

from ...pattern import Branch

Position = TypeVar("Position", int, Tensor)


def is_misaligned(branch: Branch, length: int) -> bool:
    """Whether torchscale moves rows of a sequence of this length to other positions (see the module's docstring)."""
    return branch.segment_length % branch.dilation_rate != 0 and length > branch.segment_length


def padded_segment(branch: Branch) -> int:
    """The number of rows in a segment of a misaligned branch, its zero rows included: a multiple of the rate."""
    return -(-branch.segment_length // branch.dilation_rate) * branch.dilation_rate


def padded_position(branch: Branch, position: Position) -> Position:
    """Where the row at this position of the sequence lies among the padded rows of a misaligned branch."""
    num_zeros = padded_segment(branch) - branch.segment_length
    return position + position // branch.segment_length * num_zeros


def last_segment_start(branch: Branch, length: int) -> int:
    """The position where the last segment begins.

    If the branch is not misaligned, only the last segment has zero rows.
    """
    return (length - 1) // branch.segment_length * branch.segment_length


def num_zero_keys(branch: Branch, length: int, phase: int) -> int:
    """How many zero rows a query in the last segment attends to. phase: the number of the row that the query's head
    reads first in each segment."""
    segment_length = min(branch.segment_length, length)
    num_rows = length - last_segment_start(branch, length)
    num_seen = -(-segment_length // branch.dilation_rate)
    num_rows_seen = -(-(num_rows - phase) // branch.dilation_rate)
    return num_seen - max(num_rows_seen, 0)

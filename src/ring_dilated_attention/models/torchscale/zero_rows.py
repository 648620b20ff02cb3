"""Where torchscale pads a sequence with rows of zeros, and how many of them a query sees. Integers only.

torchscale (microsoft/torchscale, component/dilated_attention.py) cuts a sequence of L positions into segments of
w = min(segment_length, L). It fills up the last segment to w with zero rows, and then each segment to a multiple of r.
So a query sees m = ceil(w / r) rows of its phase. A zero row has score 0 and value 0, and takes part in the softmax.
(Causal patterns hide zero rows: they come last.)

A branch is called *misaligned* here if r does not divide w and there are several segments. Each segment then has w
positions but takes m * r places in the output, and torchscale does not move the rows back: the rows of segment i come
out i * (m * r - w) positions later, and rows beyond L are lost. The places between hold the outputs of the zero rows.
So a misaligned branch is an aligned one, with segments of m * r, over the *padded* rows.
"""

from typing import TypeVar

from torch import Tensor

from ...pattern import Branch

Position = TypeVar("Position", int, Tensor)


def is_misaligned(branch: Branch, length: int) -> bool:
    """Whether rows of a sequence of this length come out at other positions."""
    return branch.segment_length % branch.dilation_rate != 0 and length > branch.segment_length


def padded_segment(branch: Branch) -> int:
    """The number of rows in a segment of a misaligned branch, its zero rows included: a multiple of the rate."""
    return -(-branch.segment_length // branch.dilation_rate) * branch.dilation_rate


def padded_position(branch: Branch, position: Position) -> Position:
    """The position among the padded rows of a misaligned branch that a row of the sequence gets."""
    num_zeros = padded_segment(branch) - branch.segment_length
    return position + position // branch.segment_length * num_zeros


def last_segment_start(branch: Branch, length: int) -> int:
    """The position where the last segment begins. If the branch is not misaligned, only queries from there on see zero
    rows."""
    return (length - 1) // branch.segment_length * branch.segment_length


def num_zero_keys(branch: Branch, length: int, phase: int) -> int:
    """How many zero rows a query of this phase sees in the last segment."""
    segment_length = min(branch.segment_length, length)
    num_rows = length - last_segment_start(branch, length)
    num_seen = -(-segment_length // branch.dilation_rate)
    num_rows_seen = -(-(num_rows - phase) // branch.dilation_rate)
    return num_seen - max(num_rows_seen, 0)

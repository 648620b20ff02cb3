"""Sketches a pattern that is too long to draw pair by pair: each branch has a scale of its own. No torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...forecast.call_cost import BranchShare
from ...plan.sharding import Shard, Span, shard_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEGMENTS_SHOWN = 4  # of a branch in its panel, about
# Borders of shards are not drawn if they are closer than this share of a panel's width: the panel would be all grey.
NARROWEST_SHARD = 1 / 64


class Panel(NamedTuple):
    """One branch from position 0 to `stop`.

    segments: those that begin before `stop`; the last may be cut off.
    borders: the ends of shards before `stop`; none if there are too many to draw.
    ink: how dark the pairs are drawn. It follows the share of keys that a head reads, 1/r.
    notes: lines about the branch.
    """

    stop: int
    segments: tuple[Span, ...]
    borders: tuple[int, ...]
    ink: float
    notes: tuple[str, ...]


def panels(shards: Sequence[Shard], shares: Sequence[BranchShare], *, is_dealt: bool = False) -> list[Panel]:
    """A panel for each branch of one document. is_dealt: heads are dealt for positions, so no branch travels."""
    seq_len = sum(map(shard_length, shards))
    ends = sorted(span.stop for shard in shards for span in shard)
    found = []
    for share in shares:
        w = min(share.segment_length, seq_len)
        stop = min(seq_len, SEGMENTS_SHOWN * w)
        segments = tuple(Span(a, min(a + w, stop)) for a in range(0, stop, w))
        borders = tuple(end for end in ends if end < stop)
        # Halving the share twice takes away a third of the ink, so rates up to 4,096 can be told apart and be seen.
        ink = max(0.08, (2 / 3) ** ((share.dilation_rate.bit_length() - 1) / 4 * 2))
        seen = "every key" if share.dilation_rate == 1 else f"1 key in {share.dilation_rate:,}"
        where = f"travels: up to {share.num_sharing:,} ranks share a segment" if share.travels else "stays at home"
        notes = (
            f"segments of {min(share.segment_length, share.num_positions):,}, rate {share.dilation_rate:,}",
            f"{seen}: {share.num_rows:,} of a segment",
            "computed by heads" if is_dealt else where,
        )
        found.append(Panel(stop, segments, borders if len(borders) * NARROWEST_SHARD < 1 else (), ink, notes))
    return found


def draw_panel(axes: "Axes", panel: Panel, colour: str, *, is_causal: bool) -> None:
    from matplotlib.patches import Polygon

    for start, stop in panel.segments:
        corners = [(start, start), (start, stop), (stop, stop)] + ([] if is_causal else [(stop, start)])
        axes.add_patch(Polygon(corners, closed=True, facecolor=colour, alpha=panel.ink, linewidth=0))
        axes.add_patch(Polygon(corners, closed=True, facecolor="none", edgecolor=colour, linewidth=1))
    for border in panel.borders:
        for line in (axes.axvline, axes.axhline):
            line(border, color="#999999", linewidth=0.7, linestyle=":")
    axes.set_xlim(0, panel.stop)
    axes.set_ylim(panel.stop, 0)
    axes.set_aspect("equal")
    axes.set_xticks([0, panel.stop], ["0", f"{panel.stop:,}"])
    axes.set_yticks([])
    axes.tick_params(length=0, labelsize=7)
    axes.spines[:].set_visible(False)
    axes.set_title("\n".join(panel.notes), fontsize=8)
    axes.set_xlabel("key", fontsize=8)

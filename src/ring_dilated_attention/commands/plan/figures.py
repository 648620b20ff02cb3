"""Draws a pattern, from `DilatedPattern`, and its ring, from the plan of every rank. No torch."""

import sys
from collections.abc import Sequence
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...forecast.call_cost import BranchShare, Way, count
from ...pattern import DilatedPattern
from ...plan.job import Job
from ...plan.plan import Hop, Message, Plan
from ...plan.planner import make_plan
from ...plan.sharding import Shard, Span, shard_length
from ...training.files import MADE_BY, check_mine, is_our_picture, write_whole
from ..output import check_installed, check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind readers can tell apart.
BRANCH_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#999999", "#F0E442")
INK, FAINT, EMPTY = "#222222", "#999999", "#F2F2F2"
# The most that a picture can show. MOST_SEGMENTS: those of a branch that are drawn one by one.
MOST_POSITIONS, MOST_HEADS, MOST_RANKS, MOST_COLUMNS, MOST_SEGMENTS = 64, 4, len(RANK_COLOURS), 4, 64
SEGMENTS_SHOWN = 4  # of a branch in its panel, about
# Borders of shards are not drawn if they are closer than this share of a panel's width: the panel would be all grey.
NARROWEST_SHARD = 1 / 64


class Panel(NamedTuple):
    """One branch from position 0 to `stop`."""

    stop: int
    segments: tuple[Span, ...]  # those that begin before `stop`; the last may be cut off
    borders: tuple[int, ...]  # the ends of shards before `stop`; none if there are too many to draw
    ink: float  # how dark the pairs are drawn: it follows the share of keys that a head reads, 1/r
    notes: tuple[str, ...]  # lines about the branch


def draw(path: Path, job: Job, exchange: str = "ring") -> None:
    """Draw the pattern, and the ring if it can be drawn. Print their paths on stderr. path: see `pictures_at`."""
    files, branches = pictures_at(path), count(job, Way()).branches
    why = why_no_ring(job.num_ranks, exchange)
    if job.seq_len <= MOST_POSITIONS:
        pictures = {files[0]: draw_pattern(job.pattern, job.seq_len, job.num_heads)}
    else:
        found = panels(job.shards, branches, is_dealt=exchange == "all_to_all")
        pictures = {files[0]: draw_sketch(found, is_causal=job.pattern.is_causal)}
    if why is None:
        pictures[files[1]] = draw_ring(job, branches)
    save(pictures)
    print(*pictures, sep="\n", file=sys.stderr)
    if why is not None:
        print(f"no picture of the ring: {why}", file=sys.stderr)


def pictures_at(path: Path) -> tuple[Path, Path]:
    """The files of the pattern and the ring: two in the folder `path`, or NAME.png and NAME-ring.png."""
    if path.is_dir() or not path.suffix:
        return path / "pattern.png", path / "ring.png"
    if path.suffix.lower() != ".png":
        raise ValueError(f"--picture {path}: pictures are PNG: name one NAME.png, or give a folder without a dot")
    return path, path.with_name(f"{path.stem}-ring{path.suffix}")


def check_picture(path: Path) -> None:
    """Raise ValueError if nothing can be drawn, or if this would replace a file that this library did not make."""
    check_installed(["matplotlib"], "train", "--picture ")
    for file in pictures_at(path):
        check_writable("--picture", file.parent)
        check_mine(file, is_our_picture, "rda plan --picture")


def why_no_ring(num_ranks: int, exchange: str) -> str | None:
    """Why there is no picture of a ring, or None."""
    if num_ranks == 1:
        return "one rank sends nothing"
    others = {
        "all_to_all": "heads are dealt, and chunks go round no ring",
        "all_gather": "all chunks go straight to where they are needed, in one round",
    }
    too_many = f"it shows {MOST_RANKS} ranks at most, and there are {num_ranks:,}" if num_ranks > MOST_RANKS else None
    return others.get(exchange, too_many)


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


def draw_sketch(found: Sequence[Panel], *, is_causal: bool) -> "Figure":
    """One panel for each branch, each at its own scale."""
    columns = min(len(found), MOST_COLUMNS)
    rows = -(-len(found) // columns)
    figure = _figure(2.7 * columns + 0.5, 3.3 * rows + 0.7)
    every = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in every[len(found) :]:
        axes.axis("off")
    for i, (axes, panel) in enumerate(zip(every, found, strict=False)):
        draw_panel(axes, panel, BRANCH_COLOURS[i % len(BRANCH_COLOURS)], is_causal=is_causal)
    every[0].set_ylabel("query", fontsize=8)
    scale = "Each branch at its own scale; paler: sparser"
    scale += "; dotted: borders of shards" * any(panel.borders for panel in found)
    title = f"A sketch: where a head's keys lie{', causal' * is_causal}. {scale}"
    figure.suptitle(title, fontsize=10 if columns > 2 else 7)
    return figure


def save(pictures: dict[Path, "Figure"]) -> None:
    made = {}
    for path, figure in pictures.items():
        made[path] = content = BytesIO()
        figure.savefig(content, dpi=160, format="png", metadata={"Software": MADE_BY})
    for path, content in made.items():
        write_whole(path, content.getvalue(), is_our_picture, "rda plan --picture")


def branches_by_pair(pattern: DilatedPattern, seq_len: int, num_heads: int, head: int) -> list[list[list[int]]]:
    """For each query and key of a head, the branches in which the query sees the key."""
    cells: list[list[list[int]]] = [[[] for _ in range(seq_len)] for _ in range(seq_len)]
    for branch, (w, r) in enumerate(pattern.branches):
        phase = pattern.phase_of(branch, head, num_heads)
        if phase is None:
            continue
        for start in range(0, seq_len, w):
            rows = range(start + phase, min(start + w, seq_len), r)
            for i, j in product(rows, rows):
                if not pattern.is_causal or j <= i:
                    cells[i][j].append(branch)
    return cells


def draw_pattern(pattern: DilatedPattern, seq_len: int, num_heads: int) -> "Figure":
    """One panel for each head: the keys (columns) that a query (row) sees, in the colour of the pair's first branch."""
    shown = min(num_heads, MOST_HEADS)
    figure = _figure(2.7 * shown + 0.5, 3.75)
    every = figure.subplots(1, shown, squeeze=False)[0]
    for head, axes in enumerate(every):
        _draw_head(axes, pattern, seq_len, num_heads, head)
    every[0].set_ylabel("query")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = [
        Patch(color=BRANCH_COLOURS[i % len(BRANCH_COLOURS)], label=f"segments of {w}, rate {r}")
        for i, (w, r) in enumerate(pattern.branches)
    ]
    said = "each dot: one more branch has the pair"
    entries.append(Line2D([], [], ls="none", marker="o", ms=4, mec=INK, mfc="white", label=said))
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False, fontsize=9)
    figure.suptitle(f"Which keys a query sees{', causal' * pattern.is_causal}", fontsize=11)
    return figure


def _draw_head(axes: "Axes", pattern: DilatedPattern, seq_len: int, num_heads: int, head: int) -> None:
    from matplotlib.colors import to_rgb

    cells = branches_by_pair(pattern, seq_len, num_heads, head)

    def colour(i: int, j: int) -> tuple[float, float, float]:
        if cells[i][j]:
            return to_rgb(BRANCH_COLOURS[cells[i][j][0] % len(BRANCH_COLOURS)])
        return to_rgb("white" if pattern.is_causal and j > i else EMPTY)

    axes.imshow([[colour(i, j) for j in range(seq_len)] for i in range(seq_len)], interpolation="nearest")
    dots = [
        (j + 0.24 * (2 * k - (len(cells[i][j]) - 2)), i)  # beside each other, centred
        for i in range(seq_len)
        for j in range(seq_len)
        for k in range(len(cells[i][j]) - 1)
    ]
    axes.scatter([x for x, _ in dots], [y for _, y in dots], s=100 / seq_len, c="white", linewidths=0, zorder=3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([x - 0.5 for x in range(1, seq_len)], minor=True)
        axis.set_ticks(range(0, seq_len, max(1, seq_len // 4)))
    axes.grid(which="minor", color="white", linewidth=0.5)
    axes.tick_params(which="both", length=0, labelsize=7)
    axes.spines[:].set_visible(False)
    phases = [pattern.phase_of(i, head, num_heads) for i in range(len(pattern.branches))]
    axes.set_title(f"head {head}: phases {', '.join('none' if p is None else str(p) for p in phases)}", fontsize=9)
    axes.set_xlabel("key")


def draw_ring(job: Job, shares: Sequence[BranchShare]) -> "Figure":
    """Draw which rank owns which positions and which segments travel; below, what ranks compute and send by hop."""
    num_ranks, plans = job.num_ranks, [make_plan(job, rank) for rank in range(job.num_ranks)]
    num_hops = max(len(plan.hops) for plan in plans)
    heights = [0.75 + 0.27 * len(shares), 0.75 * (num_hops + 1)]
    figure = _figure(1.6 * num_ranks + 3, sum(heights) + 0.5)
    above, below = figure.subplots(2, 1, height_ratios=heights, sharex=True)
    _draw_shards(above, job, plans)
    _draw_branches(above, job, shares)
    _draw_hops(below, plans, num_hops)
    below.set_xlim(-1.75, num_ranks - 0.3)
    figure.suptitle(f"Dilate, then send: the ring of {num_ranks} ranks, forward", fontsize=11)
    return figure


def _draw_shards(axes: "Axes", job: Job, plans: Sequence[Plan]) -> None:
    width = job.num_ranks / job.seq_len  # of a position: all together are as wide as the columns of ranks below
    is_short = job.seq_len <= MOST_POSITIONS
    for rank, (shard, plan) in enumerate(zip(job.shards, plans, strict=True)):
        positions = [t for span in shard for t in range(span.start, span.stop)] if is_short else []
        travelling = {positions[row] for row in _packed_rows(plan, head=0)} if is_short else set()
        for t in positions:
            _draw_position(axes, t * width - 0.5, width, RANK_COLOURS[rank], is_filled=t in travelling)
        for start, stop in shard:
            if not is_short:
                _draw_position(axes, start * width - 0.5, (stop - start) * width, RANK_COLOURS[rank], is_filled=True)
            axes.text((start + stop) / 2 * width - 0.5, 1.3, f"rank {rank}", ha="center", fontsize=9, color=INK)
    _label(axes, 0.5, "positions; filled: rows\nof head 0 that travel" if is_short else f"{job.seq_len:,} positions")


def _draw_branches(axes: "Axes", job: Job, shares: Sequence[BranchShare]) -> None:
    """Draw the segments of each branch; those that travel are thick. Too many segments become one dotted line."""
    seq_len, width = job.seq_len, job.num_ranks / job.seq_len
    for branch, share in enumerate(shares):
        y, w = -0.7 - 0.8 * branch, share.segment_length
        style: dict[str, Any] = {"color": INK if share.travels else FAINT, "linewidth": 2.4 if share.travels else 1.2}
        if seq_len <= MOST_SEGMENTS * w:
            gap = 0.12 if seq_len <= MOST_POSITIONS else 0.004 * seq_len
            for start in range(0, seq_len, w):
                stop = min(start + w, seq_len)
                ends = [(start + gap) * width - 0.5, (stop - gap) * width - 0.5]
                axes.plot(ends, [y, y], solid_capstyle="butt", **style)
        else:
            axes.plot([-0.5, job.num_ranks - 0.5], [y, y], linestyle=(0, (1, 1)), **style)
        what = f"travel ({share.num_sharing} ranks)" if share.travels else "stay"
        _label(axes, y, f"segments of {min(w, seq_len):,}, rate {share.dilation_rate:,}: {what}")
    axes.set_ylim(-0.3 - 0.8 * len(shares), 2)
    axes.axis("off")


def _label(axes: "Axes", y: float, text: str) -> None:
    """Text in the column at the left."""
    axes.text(-0.72, y, text, ha="right", va="center", fontsize=8, color=INK)


def _packed_rows(plan: Plan, head: int) -> set[int]:
    """The rows of a head that go into the rank's own chunks."""
    return {
        rows.first + rows.heads.index(head) * rows.shift + j * rows.step
        for rows, _ in plan.packs
        if head in rows.heads
        for j in range(rows.num_rows)
    }


def _draw_position(axes: "Axes", x: float, width: float, colour: str, *, is_filled: bool) -> None:
    from matplotlib.patches import Rectangle

    face = colour if is_filled else "white"
    axes.add_patch(Rectangle((x + 0.08 * width, 0), 0.84 * width, 1, facecolor=face, edgecolor=colour, linewidth=1))


def _draw_hops(axes: "Axes", plans: Sequence[Plan], num_hops: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    for moment in range(num_hops + 1):
        y = -0.75 * moment
        for rank, plan in enumerate(plans):
            hops = [Hop(), *plan.hops, *[Hop()] * (num_hops + 1 - len(plan.hops))]
            sources = sorted({message.owner for message in hops[moment].receives}) if moment else [rank]
            shape = "round,pad=0,rounding_size=0.06"
            box = FancyBboxPatch((rank - 0.31, y - 0.27), 0.62, 0.54, boxstyle=shape, linewidth=1)
            box.set(facecolor="white" if sources else EMPTY, edgecolor=RANK_COLOURS[rank])
            axes.add_patch(box)
            _draw_work(axes, rank, y, sources, is_local=moment == 0)
            for message in hops[moment + 1].sends:
                _draw_message(axes, rank, message, y, len(plans))
        what = "compute with own rows" if moment == 0 else f"compute with chunks of hop {moment}"
        flies = f"\nwhile hop {moment + 1} flies" if moment < num_hops else ""
        _label(axes, y, f"{what}{flies}")
    axes.set_ylim(-0.75 * num_hops - 0.4, 0.4)
    axes.axis("off")


def _draw_work(axes: "Axes", rank: int, y: float, sources: Sequence[int], *, is_local: bool) -> None:
    if not sources:
        axes.text(rank, y, "idle", ha="center", va="center", fontsize=8, color=FAINT)
        return
    keys = "own keys" if is_local else f"keys of {', '.join(map(str, sources))}"
    axes.text(rank + 0.06, y, f"queries of {rank}\n× {keys}", ha="center", va="center", fontsize=8, color=INK)
    for i, source in enumerate(sources):
        height = 0.4 / len(sources)
        bottom = y + 0.2 - (i + 1) * height + 0.015
        axes.bar(rank - 0.25, height - 0.03, width=0.07, bottom=bottom, color=RANK_COLOURS[source])


def _draw_message(axes: "Axes", rank: int, message: Message, y: float, num_ranks: int) -> None:
    """Draw an arrow in the colour of the chunk's owner. From last to first rank: out on the right, in on the left."""
    arrow = dict(arrowstyle="-|>", color=RANK_COLOURS[message.owner], linewidth=2, shrinkA=0, shrinkB=0)
    style: dict[str, Any] = {"arrowprops": arrow, "annotation_clip": False}
    if message.peer == rank + 1:
        axes.annotate("", xy=(rank + 0.68, y), xytext=(rank + 0.32, y), **style)
    elif rank == num_ranks - 1 and message.peer == 0:
        axes.annotate("", xy=(rank + 0.56, y), xytext=(rank + 0.32, y), **style)
        axes.annotate("", xy=(-0.32, y), xytext=(-0.56, y), **style)
    else:
        bent = style | {"arrowprops": arrow | {"connectionstyle": "arc3,rad=-0.35"}}
        side = 0.32 if message.peer > rank else -0.32
        axes.annotate("", xy=(message.peer - side, y - 0.1), xytext=(rank + side, y - 0.1), **bent)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")

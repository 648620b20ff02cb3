"""Writes docs/how_it_works.md from the code: python tests/how_it_works.py. `test_how_it_works.py` compares."""

from pathlib import Path

import torch

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.plan.exchange import RankPlan, plan_exchange
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.program import Program, make_program
from ring_dilated_attention.plan.rows import Rows
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.plan.step import Terms
from ring_dilated_attention.reference import dilated_attention_reference, multiplicity
from ring_dilated_attention.run.merge import merge_

PAGE = Path(__file__).parents[1] / "docs" / "how_it_works.md"
PATTERN = DilatedPattern((4, 8), (1, 2))
NUM_POSITIONS, NUM_HEADS, NUM_RANKS, HEAD_DIM = 8, 2, 2, 1
JOB = Job(PATTERN, make_shards("contiguous", (4, 4)), NUM_HEADS, NUM_HEADS)
QUERY, HEAD = 0, 0  # whose two partials are merged on the page
PLACES = 4


def rank_plan(rank: int) -> RankPlan:
    return plan_exchange("ring", JOB, rank)


def program(rank: int, stage: str) -> Program:
    return make_program(rank_plan(rank).plan, stage, Terms())


def seen(head: int) -> str:
    """A row for each query: how many branches show it each key."""
    counts = multiplicity(PATTERN, NUM_POSITIONS, NUM_HEADS)[head].long().tolist()
    lines = ["        key 0 1 2 3 | 4 5 6 7"]
    for query, row in enumerate(counts):
        cells = [str(count) if count else "." for count in row]
        lines.append(f"query {query}     {' '.join(cells[:4])} | {' '.join(cells[4:])}")
        if query == 3:
            lines.append("            --------+--------")
    return "\n".join(lines)


def travelling() -> str:
    """The rows in each rank's message, as global positions."""
    lines = ["| from | to | head 0 | head 1 | units |", "|---|---|---|---|---|"]
    for rank in range(NUM_RANKS):
        plan, first = rank_plan(rank).plan, JOB.shards[rank][0].start
        ((rows, _),) = plan.packs
        (message,) = plan.hops[0].sends
        cells = [", ".join(str(first + row) for row in rows_of(rows, k)) for k in range(NUM_HEADS)]
        lines.append(f"| rank {rank} | rank {message.peer} | {cells[0]} | {cells[1]} | {message.size} |")
    return "\n".join(lines)


def rows_of(rows: Rows, k: int) -> range:
    start = rows.first + k * rows.shift
    return range(start, start + rows.num_rows * rows.step, rows.step)


def inputs() -> list[torch.Tensor]:
    """Query, key and value (1, 8, 2, 1): small numbers that a reader can follow."""
    positions = torch.arange(NUM_POSITIONS, dtype=torch.float64).view(1, -1, 1, 1).expand(1, -1, NUM_HEADS, 1)
    return [torch.ones_like(positions), positions / 10, positions.clone()]


def partials() -> list[tuple[str, float, float]]:
    """What rank 0 computes for the query, tile by tile: of which keys, and the tile's out and lse."""
    query, key, value = inputs()
    found = []
    for keys in (range(4), range(0, 4, 2), range(4, 8, 2)):
        q, k, v = (
            x[:, rows, HEAD : HEAD + 1].transpose(1, 2) for x, rows in ((query, [QUERY]), (key, keys), (value, keys))
        )
        out, lse = cpu.forward(q, k, v, False, 1.0)
        found.append((", ".join(map(str, keys)), out.item(), lse.item()))
    return found


def merging() -> str:
    """The table of merges, and the definition's answer below it."""
    lines = ["| tile | keys | its out | its lse | out so far | lse so far |", "|---|---|---|---|---|---|"]
    names = ("branch (4, 1)", "branch (8, 2), own keys", "branch (8, 2), received keys")
    out, lse = torch.zeros(1, 1, dtype=torch.float64), torch.full((1,), -torch.inf, dtype=torch.float64)
    for name, (keys, part_out, part_lse) in zip(names, partials(), strict=True):
        part = (torch.tensor([[part_out]], dtype=torch.float64), torch.tensor([part_lse], dtype=torch.float64))
        merge_(out, lse, *part)
        numbers = [f"{x:.{PLACES}f}" for x in (part_out, part_lse, out.item(), lse.item())]
        lines.append(f"| {name} | {keys} | {' | '.join(numbers)} |")
    defined = [x[0, QUERY, HEAD].item() for x in dilated_attention_reference(*inputs(), PATTERN, scale=1.0)]
    lines.append(
        f"| the definition | all that the query sees | | | {defined[0]:.{PLACES}f} | {defined[1]:.{PLACES}f} |"
    )
    return "\n".join(lines)


def weight() -> tuple[str, str]:
    """The second merge in numbers."""
    (_, first_out, first_lse), (_, out, lse) = partials()[:2]
    share = torch.sigmoid(torch.tensor(lse - first_lse, dtype=torch.float64)).item()
    return (
        f"sigmoid({lse:.4f} - {first_lse:.4f}) = {share:.4f}",
        f"{first_out:.4f} + {share:.4f} * ({out:.4f} - {first_out:.4f})",
    )


def page() -> str:
    share, mean = weight()
    programs = {(rank, stage): program(rank, stage) for rank in range(NUM_RANKS) for stage in ("forward", "backward")}
    return f"""# How it works: 8 positions on 2 ranks

This page follows one small call from the pattern to the numbers. `python tests/how_it_works.py` writes it from the
code, and a test compares the two.

The sequence has 8 positions and 2 heads. The pattern has two branches: segments of 4 positions at rate 1, and segments
of 8 at rate 2. It is not causal. Rank 0 holds the positions 0 to 3, rank 1 the positions 4 to 7.

## Who sees whom

A branch (w, r) cuts the sequence into segments of w positions. In a segment a head has every r-th position:
their queries see their keys. Head 0 begins at the first position of the segment, head 1 at the second.

A number below says in how many branches a query sees a key. The bar lies between the shards of the two ranks.

Head 0:

```
{seen(0)}
```

Head 1:

```
{seen(1)}
```

The branch (4, 1) needs no message: each of its segments lies on one rank. The branch (8, 2) has one segment, and both
ranks share it.

## Which rows travel

Each rank sends the keys and values that the other rank's queries see, and no others. A rank's rows of a shared segment
are its *chunk*. Positions are those of the whole sequence. A unit is batch times head dim numbers, so a row of keys of
one head is one unit, and its values are another.

{travelling()}

The ranks that share a segment form its *ring*, and a chunk goes from rank to rank along it. Here the ring has two
ranks, so there is one *hop*.

## The program of a rank

A plan says in integers what a rank computes, sends and receives. A program says in which order. It is made before
anything is computed, and kept for calls of the same shape. The names of rows below are local: row 0 of rank 1 is
position 4.

Rank 0, forward:

```
{programs[0, "forward"]}
```

Rank 1 does the same with the peers exchanged:

```
{programs[1, "forward"]}
```

The own tiles are computed while the chunks travel. The first tile covers all rows and heads, so its result is *adopted*
as the accumulator; later results are merged into it.

In backward the chunks travel again. A rank computes the gradients of the chunk that it received and sends them to its
owner, who adds them to its own. Rank 0, backward:

```
{programs[0, "backward"]}
```

Rank 1, backward:

```
{programs[1, "backward"]}
```

## The merge of partials

A tile gives a *partial*: `out`, the softmax mean of the values of its keys, and `lse`, the logarithm of the sum of
exp(score) over them. Partials over other keys are merged into one:

    lse' = log(exp(lse) + exp(partial_lse))
    out' = out * exp(lse - lse') + partial_out * exp(partial_lse - lse')

Take query {QUERY} of head {HEAD}. The head dim, the scale and the query are 1; at position j the key is j / 10, and
the value j. Rank 0 merges three partials:

{merging()}

The second merge in numbers: the weight of the new partial is {share}, and the mean moves to
{mean}.

Keys 0 and 2 are seen in both branches, so each counts twice in the one softmax. The last row is the definition
(`reference.py`), computed densely over all keys.
"""


if __name__ == "__main__":
    PAGE.write_text(page())

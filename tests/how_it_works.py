"""Writes docs/how_it_works.md from the code: python tests/how_it_works.py. `test_how_it_works.py` compares."""

import math
from pathlib import Path

import torch

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.program import make_program
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.plan.step import CallFacts
from ring_dilated_attention.reference import dilated_attention_reference, multiplicity
from ring_dilated_attention.run.merge import merge_

PAGE = Path(__file__).parents[1] / "docs" / "how_it_works.md"
PATTERN = DilatedPattern((4, 8), (1, 2))
NUM_POSITIONS, NUM_HEADS, NUM_RANKS, HEAD_DIM = 8, 2, 2, 1
SHARDED_CALL = ShardedCall(PATTERN, make_shards("contiguous", (4, 4)), NUM_HEADS, NUM_HEADS)
QUERY, HEAD = 0, 0  # whose partials are merged on the page
DECIMALS = 4


def rank_plan(rank):
    return plan_exchange("ring", SHARDED_CALL, rank).plan


def program(rank, stage):
    return make_program(rank_plan(rank), stage, CallFacts())


def gathered_program(num_ranks, stage):
    """Rank 0's program where results are kept."""
    shards = make_shards("contiguous", (NUM_POSITIONS // num_ranks,) * num_ranks)
    plan = plan_exchange("ring", ShardedCall(PATTERN, shards, NUM_HEADS, NUM_HEADS), 0).plan
    return make_program(plan, stage, CallFacts(kept_rows=10**6))


def seen(head):
    """A row for each query: how many branches show it each key."""
    counts = multiplicity(PATTERN, NUM_POSITIONS, NUM_HEADS)[head].long().tolist()
    lines = ["        key 0 1 2 3 | 4 5 6 7"]
    for query, row in enumerate(counts):
        cells = [str(count) if count else "." for count in row]
        lines.append(f"query {query}     {' '.join(cells[:4])} | {' '.join(cells[4:])}")
        if query == 3:
            lines.append("            --------+--------")
    return "\n".join(lines)


def travelling():
    """The rows in each rank's message, as global positions."""
    lines = ["| from | to | head 0 | head 1 | units |", "|---|---|---|---|---|"]
    for rank in range(NUM_RANKS):
        plan, first = rank_plan(rank), SHARDED_CALL.shards[rank][0].start
        ((rows, _),) = plan.packs
        (message,) = plan.hops[0].sends
        cells = [", ".join(str(first + row) for row in rows_of(rows, k)) for k in range(NUM_HEADS)]
        lines.append(
            f"| rank {rank} | rank {message.peer} | {cells[0]} | {cells[1]} | {message.size} |"
        )
    return "\n".join(lines)


def rows_of(rows, k):
    start = rows.first + k * rows.shift
    return range(start, start + rows.num_rows * rows.step, rows.step)


def inputs():
    """Query, key and value (1, 8, 2, 1): small numbers that a reader can follow."""
    positions = (
        torch.arange(NUM_POSITIONS, dtype=torch.float64)
        .view(1, -1, 1, 1)
        .expand(1, -1, NUM_HEADS, 1)
    )
    return [torch.ones_like(positions), positions / 10, positions.clone()]


def partials():
    """What rank 0 computes for the query, tile by tile: of which keys, and the tile's out and lse."""
    query, key, value = inputs()
    found = []
    for keys in (range(4), range(0, 4, 2), range(4, 8, 2)):
        q, k, v = (
            x[:, rows, HEAD : HEAD + 1].transpose(1, 2)
            for x, rows in ((query, [QUERY]), (key, keys), (value, keys))
        )
        out, lse = cpu.forward(q, k, v, False, 1.0)
        found.append((", ".join(map(str, keys)), out.item(), lse.item()))
    return found


def merging():
    """The table of merges, and the definition's answer below it."""
    lines = [
        "| tile | keys | its out | its lse | out so far | lse so far |",
        "|---|---|---|---|---|---|",
    ]
    names = ("branch (4, 1)", "branch (8, 2), own keys", "branch (8, 2), received keys")
    out, lse = torch.zeros(1, 1), torch.full((1,), -torch.inf)
    for name, (keys, its_out, its_lse) in zip(names, partials(), strict=True):
        merge_(out, lse, torch.tensor([[its_out]]), torch.tensor([its_lse]))
        numbers = [f"{x:.{DECIMALS}f}" for x in (its_out, its_lse, out.item(), lse.item())]
        lines.append(f"| {name} | {keys} | {' | '.join(numbers)} |")
    out, lse = (
        x[0, QUERY, HEAD].item() for x in dilated_attention_reference(*inputs(), PATTERN, scale=1.0)
    )
    lines.append(
        f"| the definition | all that the query sees | | | {out:.{DECIMALS}f} | {lse:.{DECIMALS}f} |"
    )
    return "\n".join(lines)


def weight():
    """The second merge in numbers."""
    (_, first_out, first_lse), (_, out, lse) = partials()[:2]
    share = 1 / (1 + math.exp(first_lse - lse))
    return (
        f"sigmoid({lse:.4f} - {first_lse:.4f}) = {share:.4f}",
        f"{first_out:.4f} + {share:.4f} * ({out:.4f} - {first_out:.4f})",
        f"{first_out + share * (out - first_out):.4f}",
    )


def page():
    share, mean, found = weight()
    return f"""# How it works: 8 positions on 2 ranks

This page follows one small call from its pattern to its numbers. `python tests/how_it_works.py` writes the page from
the code, and a test compares the two.

The sequence has 8 positions and 2 heads. Rank 0 holds the positions 0 to 3, and rank 1 the positions 4 to 7. The
pattern is not causal. It has two branches: (4, 1) has segments of 4 positions at rate 1, and (8, 2) has segments of 8
positions at rate 2.

## Who sees whom

A branch (w, r) cuts the sequence into segments of w positions. In each segment a head takes every r-th position, and
the queries at these positions see the keys at the same positions. In branch (8, 2) head 0 takes the positions 0, 2, 4
and 6, and head 1 the positions 1, 3, 5 and 7. In branch (4, 1) both heads take all positions.

Each number below says in how many branches a query sees a key; a dot stands for none. The lines separate the positions
of the two ranks.

Head 0:

```
{seen(0)}
```

Head 1:

```
{seen(1)}
```

Branch (4, 1) needs no messages, because each of its segments lies on one rank. Branch (8, 2) has a single segment,
which both ranks share.

## Which rows travel

Each rank sends only the keys and values that queries of the other rank see. These rows are the rank's *chunk*. The
table lists their positions in the whole sequence. Sizes are in *units*: the key of one position and head is one unit,
and its value is another. (With batch B and head dim D, a unit has B × D numbers.) So each chunk has 8 units: keys and
values of 2 positions for each of 2 heads.

{travelling()}

The ranks that share a segment form its *ring*. Chunks travel around the ring from rank to rank, and each move is a
*hop*. This ring has two ranks, so one hop is enough.

A sliding window needs less. Each rank sends just the rows that the first queries of the next rank still see: w - 1
positions for a window of w.

## The program of a rank

A *plan* lists in integers what a rank computes, sends and receives. A *program* puts this in order, as a list of steps.
The program is made before anything is computed. Later calls of the same shape use it again, if it has at most 1,000
tiles.

Each line below is a step. Rows are numbered within the rank: row 0 of rank 1 is position 4. A *tile* is a set of query
rows times a set of key rows, which one call of a kernel computes. `take` allocates a buffer, and `free` releases it.
"8 units at 0" are the first 8 units of a buffer. A *block* is keys of some heads, followed by their values; "a block at
0" begins at the first unit of a buffer.

Rank 0, forward:

```
{program(0, "forward")}
```

Rank 1 takes the same steps, with rank 0 as its peer:

```
{program(1, "forward")}
```

Between `post` and `wait` the messages travel, and the rank computes the two tiles whose keys are its own. The first
tile covers all rows and heads, so its result is *adopted*: it becomes the accumulator. Later results are merged into
it.

In backward the same chunks travel again. Each rank computes the gradients of the chunk that it received. When they are
complete (*finished*), it sends them to the chunk's owner. The owner adds them to the gradients of its own rows (step
`unpack`).

Rank 0, backward:

```
{program(0, "backward")}
```

Rank 1, backward:

```
{program(1, "backward")}
```

## On a GPU

There the results of tiles are kept, and *gathered* in one pass over the rows: once on one device, and once for each hop
of a ring. In a ring this is the forward of rank 0:

```
{gathered_program(NUM_RANKS, "forward")}
```

A backward first copies the rows of dout, out and lse that its tiles read. On one device:

```
{gathered_program(1, "backward")}
```

## The merge of partials

For each query a tile gives a *partial* over the keys of the tile: `out`, the mean of their values weighted by softmax,
and `lse`, the logarithm of the sum of exp(score). A further partial is merged into those before by

```text
lse' = log(exp(lse) + exp(partial_lse))
out' = out * exp(lse - lse') + partial_out * exp(partial_lse - lse')
```

Take the query at position {QUERY} in head {HEAD}. Let the head dim be 1, the scale 1 and the query 1, and at position j
let the key be j / 10 and the value j. Then rank 0 merges three partials:

{merging()}

The second row in numbers: the new partial has the weight {share}. So the mean becomes
{mean}, which is {found}.

The query sees the keys 0 and 2 in both branches, so each of them counts twice in the one softmax. The last row is the
definition (`reference.py`), computed at once over all keys that the query sees, with their counts.
"""


if __name__ == "__main__":
    PAGE.write_text(page())

"""The handshake's messages, and its errors where it goes in rounds. Functions named `rank...` run on every rank."""

import pytest
from definition import PATIENCE, noted_messages
from distributed import run

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.ranks.handshake import RefusedError


def rank_meets(rank, world_size):
    """Messages sent, and numbers found, of calls whose lengths stay, change on one rank, and are of two kinds."""
    agree = ContextParallel(timeout=PATIENCE).ranks.agree
    posted, found = noted_messages(of_handshakes=True), []
    changed = 5 + (rank == 1)
    calls = [("forward", 5), ("forward", 5), ("forward", changed)]
    calls += [("shard", -7 - rank), ("forward", changed)]  # `shard` compares hashes so
    for number, (kind, length) in enumerate(calls):
        posted.clear()
        lengths = agree(length, {"call": f"{kind} {number}"}, None)
        found.append((lengths, sum(op.__name__ == "isend" for op, *_ in posted)))
    alone = "no" if rank == 1 else None
    told = "no" if rank == 1 else "^rank 1 refused the call: no$"
    odd_call, odd_dtype = (
        ("backward 3" if rank == 0 else "forward 9"),
        ("odd" if rank == 2 else "ev"),
    )
    for call, dtype, failure, error in (
        ("forward 9", odd_dtype, None, "ranks disagree on dtype: rank 0 has ev"),
        (odd_call, "", None, "ranks disagree on call: rank 0 has backward 3, "),
        ("forward 9", "", alone, told),
        ("forward 9", "", "all say no", "^all say no$"),
    ):
        with pytest.raises(RefusedError, match=error):
            agree(5, {"call": call, "dtype": dtype}, failure)
    # refused calls changed nothing
    assert agree(changed, {"call": "forward 10"}, None) == found[2][0]
    return found


@pytest.mark.parametrize("world_size", [3, 4, 5, 8])
def test_a_handshake_sends_what_is_planned(world_size):
    """Catches lengths that are old, or exchanged again though they are those agreed before; and errors that differ."""
    old, new = (5,) * world_size, (5, 6, *[5] * (world_size - 2))
    lengths = [old, old, new, tuple(-7 - rank for rank in range(world_size)), new]
    once = (world_size - 1).bit_length()
    sent = [2 * once, once, 2 * once, 2 * once, once]
    for found in run(world_size, rank_meets):
        assert found == list(zip(lengths, sent, strict=True))

"""No rank waits for a message that stands behind its own in another rank's stream, as NCCL would run every program.

In a model of the transport a post is one launch on the one stream of its rank: it begins when the one before it is
done, and is done when all of its messages are; a message moves while the posts of both its sides run, however small it
is (NCCL promises no buffer). What a host awaits does not matter: it is always an earlier post of its own. No GPU takes
part, and no clock.
"""

from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.program import make_program
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import ShardSpec, make_shards
from ring_dilated_attention.plan.step import CallFacts, Post
from ring_dilated_attention.ranks.link import GroupLink

LENGTH = 60
BRANCHES = [
    ((LENGTH,), (1,)),
    ((8, 24, LENGTH), (1, 2, 4)),
    ((17, 31, 45), (1, 1, 3)),
    ((LENGTH, 25), (16, 7)),
]
PATTERNS = [
    DilatedPattern(*branches, is_causal=is_causal)
    for branches, is_causal in product(BRANCHES, [False, True])
]


class Side(NamedTuple):
    """One side of a message."""

    is_send: bool
    peer: int
    size: int
    moment: str


Batches = list[list[Side]]  # of one rank, in the order of posting


def posted(
    exchange: str, stage: str, pattern: DilatedPattern, sharding: str, world_size: int
) -> list[Batches]:
    """What every rank posts."""
    shards = make_shards(sharding, ShardSpec(sharding, world_size).default_lengths(LENGTH))
    ranks = []
    for rank in range(world_size):
        plan = plan_exchange(exchange, ShardedCall(pattern, shards, 2, 2), rank).plan
        posts = [step for step in make_program(plan, stage, CallFacts()) if isinstance(step, Post)]
        ranks.append(
            [
                [
                    Side(is_send, x.message.peer, x.message.size, post.moment)
                    for is_send, slices in ((True, post.sends), (False, post.receives))
                    for x in slices
                ]
                for post in posts
            ]
        )
    return ranks


def stuck_ranks(ranks: list[Batches]) -> list[int]:
    """Run everybody's batches; who has some left when nothing moves any more."""
    left = [[list(batch) for batch in batches] for batches in ranks]

    def running(rank: int, peer: int, is_send: bool) -> Side | None:
        """The next message to or from a peer, if its turn has come."""
        sides = left[rank][0] if left[rank] else []
        return next((side for side in sides if (side.is_send, side.peer) == (is_send, peer)), None)

    has_moved = True
    while has_moved:
        has_moved = False
        for a, b in product(range(len(ranks)), repeat=2):
            send, receive = running(a, b, True), running(b, a, False)
            if send is None or receive is None:
                continue
            assert send[2:] == receive[2:], f"rank {a} sends {send}, but rank {b} expects {receive}"
            for rank, side in ((a, send), (b, receive)):
                left[rank][0].remove(side)
                if not left[rank][0]:
                    left[rank].pop(0)
            has_moved = True
    return [rank for rank, batches in enumerate(left) if batches]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_no_rank_is_stuck(exchange, stage, sharding, world_size):
    """Catches sends that are posted before the receives which they need, and ranks that order batches differently."""
    for pattern in PATTERNS:
        ranks = posted(exchange, stage, pattern, sharding, world_size)
        assert any(ranks)
        assert stuck_ranks(ranks) == [], pattern


def test_sends_and_receives_apart_are_seen_to_be_stuck():
    """Proof that the model can fail: in a cycle, everybody sends and nobody has come to receive."""
    ranks = posted("ring", "backward", PATTERNS[0], "contiguous", 3)
    apart = [
        [
            side
            for batch in batches
            for side in ([s for s in batch if s.is_send], [s for s in batch if not s.is_send])
        ]
        for batches in ranks
    ]
    assert stuck_ranks([[batch for batch in batches if batch] for batches in apart]) == [0, 1, 2]


def test_batches_in_another_order_on_one_rank_are_seen():
    first, *others = posted("ring", "backward", PATTERNS[0], "contiguous", 3)
    with pytest.raises(AssertionError, match="but rank 1 expects"):
        stuck_ranks([[*first[1:], first[0]], *others])


def test_receives_are_posted_before_sends():
    """Catches messages that go one way at a time between two gloo ranks, of which one is later (`exchange`)."""
    posted: list[str] = []
    link = GroupLink.__new__(GroupLink)
    link.members, link.backends = [0, 1], {"cpu": "gloo"}
    link._post = lambda messages, moment: posted.extend(
        operation.__name__ for operation, *_ in messages
    )
    x, message = torch.zeros(1), SimpleNamespace(peer=1)
    link.carry([(x, message)], [(x, message)], "both")
    link.carry_apart([(x, message)], [(x, message)], "both")
    assert posted == ["irecv", "isend"] * 2

"""With whom a rank exchanges a first message, and when. (test_faults.py: ranks that fail meanwhile.)"""

import time
from datetime import timedelta

import torch
from distributed import run
from helpers import randn

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.ranks.processes import Processes


def call(parallel, rows, is_causal=False, dtype=torch.float32):
    x = randn(1, rows, 2, 4).to(dtype).requires_grad_()
    pattern = DilatedPattern((1024,), (1,), is_causal=is_causal)
    dilated_attention(x, x, x, pattern, parallel=parallel).sum().backward()


def rank_tells_its_peers(rank, world_size):
    found = []
    for is_causal, exchange in ((False, "ring"), (True, "ring"), (False, "all_gather")):
        parallel = ContextParallel(exchange=exchange)
        for _ in range(2):
            call(parallel, 3, is_causal)
        found.append((parallel.ranks.control.reached, parallel.ranks.all.reached))
    parallel = ContextParallel()
    parallel.unshard(parallel.shard(torch.ones(1, 2 * world_size)))
    found.append((parallel.ranks.control.reached, parallel.ranks.all.reached))
    return found


def test_a_rank_reaches_the_peers_of_its_plans():
    """log2 p further on and as many further back for handshakes; for data, the peers of the plans."""
    p = 8
    everyone = run(p, rank_tells_its_peers)
    for rank, (ring, causal, gathered, unsharded) in enumerate(everyone):
        near = {(rank + step) % p for step in (1, 2, 4, -1, -2, -4)}
        others = set(range(p)) - {rank}
        assert ring == (near, {(rank + 1) % p, (rank - 1) % p})
        assert gathered == unsharded == (near, others)
        assert causal[0] == near
        assert {(rank + 1) % p, (rank - 1) % p} <= causal[1] <= others
    # In a causal ring, gradients go straight to the owner of the keys: each rank to all before it.
    assert everyone[p - 1][1][1] == set(range(p - 1))


def rank_knows_other_calls(rank, world_size):
    """Rank 0 always holds 4 rows, so its calls look alike; those of others do not."""
    parallel = ContextParallel(timeout=timedelta(seconds=10), exchange="ring")
    first, second, wide = [4, 3, 5], [4, 5, 3], torch.float64
    for lengths, dtype in (
        (first, wide), (second, wide), (first, wide), (second, torch.float32), (second, wide), (first, torch.float32),
        (first, wide), (second, torch.float32), (second, wide),
    ):  # fmt: skip
        call(parallel, lengths[rank], dtype=dtype)
    return len(parallel.ranks.known)


def test_ranks_that_know_different_calls():
    """Catches a rank that waits for first messages of others while they presume that all have come."""
    assert run(3, rank_knows_other_calls)[0] < 9


def rank_leaves_early(rank, world_size):
    """Rank 0 has a document alone. It and ranks 1 and 2 close their contexts while rank 3 waits for rank 4."""
    parallel, route = ContextParallel(timeout=timedelta(seconds=10), exchange="ring"), Processes.route

    def slow_route(*args):
        time.sleep(1.5)
        return route(*args)

    if rank == 4:
        Processes.route = slow_route
    x, documents = randn(1, 4, 2, 4), torch.tensor([0, 4, 12, 20], dtype=torch.int32)
    dilated_attention(x, x, x, DilatedPattern((64,), (1,)), parallel=parallel, cu_seqlens=documents)
    parallel.close()


def test_a_rank_that_is_done_may_leave():
    """Catches a rank that takes the end of a neighbour for its death."""
    run(5, rank_leaves_early)

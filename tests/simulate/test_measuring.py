"""What `simulate.measuring` says that simulated ranks hold and send, against their plans."""

from functools import partial

import torch
from helpers import message_of

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.simulate.one_rank import OtherRanks


def test_measuring_adds_up_over_calls():
    """Bytes sent are a sum, the peak is a maximum; and what is done outside of the block is not counted."""
    cp = simulate.all_ranks(2)
    x, pattern = torch.ones(1, 8, 2, 4), DilatedPattern((8,), (1,))
    attend = partial(dilated_attention, x, x, x, pattern, parallel=cp)
    attend()
    with simulate.measuring(cp) as once:
        attend()
    with simulate.measuring(cp) as twice:
        attend()
        attend()
    attend()
    for rank, (a, b) in enumerate(zip(once, twice, strict=True)):
        assert b == (rank, 2, 2 * a.sent_bytes, a.peak_bytes)
        assert a.sent_bytes == 2 * 4 * 2 * 4 * 4  # K and V, 4 positions, 2 heads of 4, float32
        assert str(a) == f"rank {rank} of 2: held {a.peak_bytes:,} bytes at most, sent 256"


def test_measuring_is_for_simulated_ranks():
    for cp in (ContextParallel(), simulate.one_rank(1, 4, OtherRanks())):
        assert "that simulate.all_ranks" in message_of(simulate.measuring(cp).__enter__)

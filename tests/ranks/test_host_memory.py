"""CUDA tensors travel through host memory on gloo, so several processes can share one GPU."""

import pytest
import torch
from definition import check_step, whole
from distributed import run
from helpers import rows_of

from ring_dilated_attention import ContextParallel, DilatedPattern
from ring_dilated_attention.ranks.link import GroupLink

PATTERN = DilatedPattern((8, 41), (1, 3), is_causal=True)


def rank_goes_through_the_host(rank, world_size, device):
    through_host = []
    if device == "cpu":  # the same path, with nothing but the device pretended

        def needs_host(link, x):
            through_host.append(x.shape)
            return True

        GroupLink._needs_host = needs_host
    dtype, bound = (torch.float64, 1e-12) if device == "cpu" else (torch.float32, 1e-5)
    inputs = whole(41, heads=(4, 4, 4), batch=2, head_dim=16)
    for exchange in ("ring", "all_gather", "all_to_all"):
        cp = ContextParallel(exchange=exchange)
        through_host.clear()

        def cut(x, cp=cp):
            return rows_of(cp, x).to(device, dtype)

        for _ in range(2):
            check_step(cp, inputs, PATTERN, cut=cut, bound=bound)
        assert through_host or device != "cpu"


def test_messages_through_the_host_bring_what_direct_ones_bring():
    run(2, rank_goes_through_the_host, "cpu")


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: two processes share it"
)


@needs_gpu
# What drivers of a new machine warn of is not known beforehand.
@pytest.mark.filterwarnings("default")
def test_two_processes_share_one_gpu():
    run(2, rank_goes_through_the_host, "cuda")

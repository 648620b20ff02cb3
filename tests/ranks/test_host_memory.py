"""CUDA tensors travel through host memory on gloo, so several processes can share one GPU."""

import pytest
import torch
from distributed import run

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.ranks.link import GroupLink
from ring_dilated_attention.reference import dilated_attention_reference

PATTERN = DilatedPattern((8, 41), (1, 3), is_causal=True)


def ring_on(rank, world_size, device, exchange):
    seen = []
    if device == "cpu":  # the same path, with nothing but the device pretended

        def needs_host(link, x):
            seen.append(x.shape)
            return True

        GroupLink._needs_host = needs_host
    torch.manual_seed(0)
    dtype = torch.float64 if device == "cpu" else torch.float32
    full = [torch.randn(2, 41, 4, 16, dtype=dtype) for _ in range(4)]
    leaves = [x.double().requires_grad_() for x in full[:3]]
    out, _ = dilated_attention_reference(*leaves, PATTERN)
    expected = [out, *torch.autograd.grad(out, leaves, full[3].double())]

    cp = ContextParallel(exchange=exchange)
    local = [cp.shard(x.to(device)).requires_grad_() for x in full[:3]]
    for _ in range(2):
        found = dilated_attention(*local, PATTERN, parallel=cp)
        grads = torch.autograd.grad(found, local, cp.shard(full[3].to(device)))
        for x, y in zip((found, *grads), expected, strict=True):
            assert x.device.type == device
            torch.testing.assert_close(
                x.cpu().double(), cp.shard(y), rtol=0, atol=1e-12 if device == "cpu" else 1e-5
            )
    return len(seen)


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all"])
def test_messages_through_the_host_bring_what_direct_ones_bring(exchange):
    assert all(number > 0 for number in run(2, ring_on, "cpu", exchange))


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: two processes share it"
)
# What drivers of a new machine warn of is not known beforehand.
lets_drivers_warn = pytest.mark.filterwarnings("default")


@needs_gpu
@lets_drivers_warn
@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all"])
def test_two_processes_share_one_gpu(exchange):
    run(2, ring_on, "cuda", exchange)

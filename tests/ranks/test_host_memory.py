"""CUDA tensors travel through host memory on gloo, so several processes can share one GPU."""

import time

import pytest
import torch
from distributed import run

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.ranks.link import GroupLink
from ring_dilated_attention.ranks.presumed import Presumed
from ring_dilated_attention.ranks.processes import Processes
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
    for _ in range(2):  # a call that repeats another begins before its handshake is through
        found = dilated_attention(*local, PATTERN, parallel=cp)
        grads = torch.autograd.grad(found, local, cp.shard(full[3].to(device)))
        for x, y in zip((found, *grads), expected, strict=True):
            assert x.device.type == device
            torch.testing.assert_close(x.cpu().double(), cp.shard(y), rtol=0, atol=1e-12 if device == "cpu" else 1e-5)
    return len(seen)


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all"])
def test_messages_through_the_host_bring_what_direct_ones_bring(exchange):
    assert all(number > 0 for number in run(2, ring_on, "cpu", exchange))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: two processes share it")
# What drivers of a new machine warn of is not known beforehand.
lets_drivers_warn = pytest.mark.filterwarnings("default")


@needs_gpu
@lets_drivers_warn
@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all"])
def test_two_processes_share_one_gpu(exchange):
    run(2, ring_on, "cuda", exchange)


def rank_begins(rank, world_size, device):
    """Whether the device had its work with own rows when the host first waited for the handshake, in repeated calls."""
    had_work, confirm, agree = [], Presumed.confirm, Processes._agree

    def noting_confirm(presumed):
        had_work[-1].append(device == "cpu" or not torch.cuda.current_stream().query())
        return confirm(presumed)

    def late_agree(*args):
        time.sleep(0.05)  # else the handshake may be through before there is anything to compute
        return agree(*args)

    Presumed.confirm, Processes._agree = noting_confirm, late_agree
    cp = ContextParallel(exchange="ring")
    x = torch.zeros(1, 64 if device == "cpu" else 16_384, 8, 64, device=device)
    for _ in range(4):
        had_work.append([])
        dilated_attention(x, x, x, DilatedPattern.dense(), parallel=cp)
        if device != "cpu":
            torch.cuda.synchronize()
    return [moments[:1] for moments in had_work]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[needs_gpu, lets_drivers_warn])])
def test_a_gpu_has_its_own_rows_before_the_host_waits_for_the_handshake(device):
    """On the CPU this is the rehearsal of the test, and of nothing else."""
    for had_work in run(2, rank_begins, device):
        assert had_work == [[], [True], [True], [True]]  # the first call knows no lengths

"""What a call on a GPU launches beside the calls of torch's attention, counted on fake tensors. No GPU is needed, nor
Triton: stand-ins count its launches.
"""

import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.kernels import rows_at_once, sdpa
from ring_dilated_attention.kernels.contract import BackwardRows
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.run import executor
from ring_dilated_attention.run.executor import ExecutorOptions

# LongNet's: five branches, 12 calls of the kernel
PATTERN = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12), is_causal=True)
ROW_KERNELS = "ring_dilated_attention.kernels.row_kernels"


@pytest.fixture
def launched(gpu, monkeypatch):
    """As on an H100 with Triton, whatever this machine is. Returns what is launched."""
    gpu((9, 0))
    counts = Counter()

    def kernel(name):
        def launches(grid):
            assert all(0 < size < 2**31 for size in grid)
            return lambda *args, **kwargs: counts.update([name])

        return MagicMock(**{"__getitem__.side_effect": launches})

    names = ("write_kernel", "merge_kernel", "add_kernel", "lay_out_kernel")
    kernels = {name: kernel(name) for name in names}
    dtypes = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16))
    monkeypatch.setitem(sys.modules, ROW_KERNELS, SimpleNamespace(**kernels, DTYPES=dtypes))
    monkeypatch.setattr(rows_at_once, "why_not", lambda device: None)
    monkeypatch.setattr(rows_at_once, "_on_device", lambda x: nullcontext())
    return counts


class Counted(TorchDispatchMode):
    """Counts ops that launch a kernel: all but views and new tensors."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        is_free = (
            func.is_view or "empty" in name or name in ("_unsafe_view", "detach", "promote_types")
        )
        if "attention" in name:
            self.counts["attention"] += 1
        elif func.namespace == "aten" and not is_free:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("op", "dtype", "num_rows", "stage", "expected"),
    [
        (CUDNN, torch.float16, 32_768, "forward", (12, 2)),
        (FLASH, torch.bfloat16, 32_768, "forward", (12, 2)),
        (EFFICIENT, torch.float32, 16_384, "forward", (12, 2)),
        (CUDNN, torch.float16, 32_768, "backward", (12, 8)),
        (FLASH, torch.bfloat16, 32_768, "backward", (12, 8)),
        (EFFICIENT, torch.float32, 16_384, "backward", (12, 8)),
        # the last segments are shorter, and have tiles of their own
        (EFFICIENT, torch.float32, 12_001, "backward", (23, 11)),
        # float32 takes more memory, so that heads are computed in two blocks
        (EFFICIENT, torch.float32, 32_768, "backward", (17, 12)),
        # in twelve blocks
        (CUDNN, torch.float16, 524_288, "backward", (60, 60)),
        # with a gradient of lse: query, key and value of each tile are made wider
        (CUDNN, torch.float16, 32_768, "backward with dlse", (12, 72)),
        (FLASH, torch.bfloat16, 32_768, "backward with dlse", (12, 72)),
        (EFFICIENT, torch.float32, 16_384, "backward with dlse", (12, 56)),
    ],
)
def test_kernels_beside_attention(launched, op, dtype, num_rows, stage, expected):
    """Catches a copy, a cast or a merge for each tile, and more blocks of heads.

    expected: the calls of attention, and the further kernels.
    """
    sharded_call = ShardedCall(PATTERN, make_shards("contiguous", (num_rows,)), 12, 12)
    plan, options = plan_exchange("none", sharded_call, 0), ExecutorOptions(sdpa, 0.125)
    # The fake tensors are on the CPU: a build of torch for CPUs cannot index others.
    with FakeTensorMode(), sdpa_kernel(op):
        shape = (1, num_rows, 12, 64)
        query, key, value, out, dout = (torch.empty(shape, dtype=dtype) for _ in range(5))
        lse, dlse = torch.empty(shape[:3]), torch.empty(shape[:3]) if "dlse" in stage else None
        rows = BackwardRows(dout, dlse, query, key, value, out, lse)
        with Counted(launched):
            if stage == "forward":
                executor.forward(plan, options, query, key, value)
            else:
                executor.backward(plan, options, rows)
    assert (launched.pop("attention"), launched.total()) == expected, launched

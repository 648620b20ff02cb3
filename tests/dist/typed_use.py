"""A user's file with strict types: the README's calls, and more of the public interface.

`make dist` checks it with mypy --strict against the installed wheel and its py.typed. `make test` checks it against the
sources, with those flags of --strict that concern one file. Nothing here runs.
Calls of modules, such as `attention(x, x, x)`, give Any, as torch's nn.Module has it: they are not checked.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    MultiheadDilatedAttention,
    dilated_attention,
    explain,
    save_attention,
    simulate,
)
from ring_dilated_attention.models import LongNetLM


def one_device(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    pattern = DilatedPattern(segment_lengths=(1024, 4096), dilation_rates=(1, 4), is_causal=True)
    kernel: str = explain(query, key, value, pattern).kernel
    print(kernel, pattern.explain(num_heads=8))
    out, lse = dilated_attention(query, key, value, pattern, return_lse=True)
    both: Tensor = out + lse
    out.sum().backward()  # type: ignore[no-untyped-call]
    return dilated_attention(query, key, value, pattern) + both


def two_devices() -> None:
    dist.init_process_group("gloo")
    parallel = ContextParallel(sharding="zigzag")
    pattern = DilatedPattern.dense(is_causal=True)
    cu_seqlens = torch.tensor([0, 1000, 4096], dtype=torch.int32)
    query, key, value = (parallel.shard(torch.randn(1, 4096, 8, 64)) for _ in range(3))
    out = dilated_attention(query, key, value, pattern, parallel=parallel, cu_seqlens=cu_seqlens)
    rank: int = parallel.rank
    positions: Tensor = parallel.positions(4096, cu_seqlens)
    whole: Tensor = parallel.unshard(out)
    print(f"rank {rank}: {tuple(out.shape)}", whole[positions])
    parallel.close()
    dist.destroy_process_group()


def loss_of(parallel: ContextParallel, batch: dict[str, Tensor]) -> Tensor:
    pattern = DilatedPattern.longnet(4096, is_causal=True)
    attention = MultiheadDilatedAttention(64, 4, pattern, rotary=True, parallel=parallel)
    local: dict[str, Tensor] = parallel.shard_batch(batch)
    terms: Tensor = attention(local["x"], local["x"], local["x"])[0].sum()
    return parallel.mean_loss(terms, local["x"].numel())


def simulated(query: Tensor, pattern: DilatedPattern) -> int:
    parallel = simulate.all_ranks(4)
    with simulate.measuring(parallel) as ranks:
        print(dilated_attention(query, query, query, pattern, parallel=parallel).sum())
    return max(rank.peak_bytes for rank in ranks)


def generated(query: Tensor, pattern: DilatedPattern) -> Tensor:
    cache = DilatedCache(pattern, batch=1, num_heads=8, num_kv_heads=8, head_dim=64)
    out: Tensor = dilated_attention(query, query, query, pattern, cache=cache)
    model = LongNetLM.from_run("runs/20250131-120000")
    for tokens in model.generate([list(b"def ")], 200, temperature=0.7, seed=0):
        print(bytes(tokens.tolist()).decode("latin-1"))
    print(cache.position, save_attention)
    return out

"""Measure block sizes on the GPU of this machine and print lines for `configs.json`.

    python -m benchmarks.tune --head-dim 64 --head-dim 128 --dtype bfloat16

Unverified: written without a GPU at hand. Each kernel runs dense causal attention over one segment, the inner work of
every pattern; a candidate that does not compile or does not fit is skipped, and said so. Nothing is written: put the
lines into `configs.json`, then run `python -m benchmarks.resources --write` and the tests.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
import triton

from ring_dilated_attention.kernels.contract import BackwardRows
from ring_dilated_attention.kernels.triton import in_place, launch
from ring_dilated_attention.kernels.triton.block_sizes import KERNELS, Config, architecture

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def candidates(kernel: str, dtype: torch.dtype) -> Iterator[Config]:
    """Half as many rows for "forward_half" as for "forward"; blocks of 16 too where a number takes four bytes."""
    small = (16,) if dtype.itemsize == 4 else ()
    rows = {"forward": (32, 64, 128), "forward_half": (16, 32, 64)}.get(kernel, (*small, 32, 64, 128))
    for block_m, block_n, num_warps, num_stages in product(rows, (*small, 32, 64, 128), (4, 8), (1, 2, 3)):
        if block_m * block_n <= 128 * 128:
            yield Config(block_m, block_n, num_warps, num_stages)


def timed(kernel: str, head_dim: int, dtype: torch.dtype, seq_len: int) -> Callable[[], object]:
    """The kernel on one segment of seq_len rows, 16 heads."""
    shape = (1, seq_len, 16, head_dim)
    tensors = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4)]
    q, k, v, dout = (x.transpose(1, 2) for x in tensors)
    out, *grads = (torch.empty(shape, device="cuda").transpose(1, 2) for _ in range(4))
    lse = torch.empty(shape[:3], device="cuda", dtype=torch.float64).transpose(1, 2)  # as where branches are merged
    how = (True, head_dim**-0.5)
    in_place.forward_into(q, k, v, out, lse, *how, first=True)
    delta = in_place.delta(tensors[3], None, out.transpose(1, 2)).transpose(1, 2)
    rows = BackwardRows(dout, None, q, k, v, out, lse.float(), delta)
    if kernel == "query_gradient":
        return lambda: in_place.query_gradient_into(rows, grads[0], *how, first=True)
    if kernel == "key_gradient":
        return lambda: in_place.key_gradient_into(rows, grads[1], grads[2], *how, first=True)
    return lambda: in_place.forward_into(q, k, v, out, lse, *how, first=True)


def best(kernel: str, head_dim: int, dtype: torch.dtype, seq_len: int, rows: int | None) -> Config:
    """The fastest candidate, by the median; of `rows` query rows, if given.

    Raises:
        RuntimeError: if none runs, or the device does not any more.
    """
    configured = launch.config_for
    call = timed(kernel, head_dim, dtype, seq_len)
    times: dict[Config, float] = {}
    try:
        for candidate in candidates(kernel, dtype):
            if rows in (None, candidate.block_m):
                launch.config_for = lambda name, x, chosen=candidate: chosen  # type: ignore[misc]
                try:
                    times[candidate] = triton.testing.do_bench(call, return_mode="median")
                except (triton.errors.TritonError, RuntimeError) as error:  # too large, or does not compile
                    _say(f"{kernel}, {candidate}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
                    torch.cuda.synchronize()  # raises if nothing runs in this process any more
    finally:
        launch.config_for = configured
    for candidate, milliseconds in sorted(times.items(), key=lambda entry: entry[1])[:5]:
        _say(f"{kernel}, head dim {head_dim}: {milliseconds:.3f} ms with {candidate}")
    if not times:
        raise RuntimeError(f"no candidate for {kernel} with {rows or 'any'} rows ran; the reasons are above.")
    return min(times, key=lambda candidate: times[candidate])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", action="append", type=int, choices=(16, 32, 64, 128, 256))
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seq-len", type=int, default=8192)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tuning needs a GPU, and torch sees none.", file=sys.stderr)
        return 1
    print(f"{architecture(torch.device('cuda', torch.cuda.current_device()))}, {options.dtype}:", flush=True)
    for head_dim in options.head_dim or (64, 128):
        found: dict[str, Config] = {}
        for kernel in KERNELS:
            rows = found["forward"].block_m // 2 if kernel == "forward_half" else None
            found[kernel] = best(kernel, head_dim, DTYPES[options.dtype], options.seq_len, rows)
        print(f'  "{head_dim}": {json.dumps(found)},', flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

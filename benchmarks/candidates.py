"""Who is timed on a GPU: this library, torch's dense attention, and a peer's dilated attention.

A candidate is data, so that it can be named to another process and in a record.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.functional import scaled_dot_product_attention

from ring_dilated_attention.attention import dilated_attention
from ring_dilated_attention.pattern import DilatedPattern

from .measure import Sizes, call_json
from .peers.adapters import torchscale_attention

OWN = "sdpa"  # this library's backend on a GPU


class Op(NamedTuple):
    """One of torch's attention ops: how it is asked for, and what its name contains, by which a profile shows it.

    implementation: of flash attention in torch's registry; "" is the one that torch brings.
    """

    backend: SDPBackend
    implementation: str
    name: str


OPS = {
    "flash": Op(SDPBackend.FLASH_ATTENTION, "", "flash_attention"),
    "flash 3": Op(SDPBackend.FLASH_ATTENTION, "FA3", "flash_attention"),
    "flash 4": Op(SDPBackend.FLASH_ATTENTION, "FA4", "flash_attention"),
    "cuDNN": Op(SDPBackend.CUDNN_ATTENTION, "", "cudnn_attention"),
}


class Candidate(NamedTuple):
    """What is timed.

    how: OWN, "torch" (dense) or "torchscale".
    op: one of OPS, or "" where there is none to choose.
    pattern: None is dense attention.
    """

    how: str
    op: str = ""
    pattern: DilatedPattern | None = None

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.how, self.op, "" if self.pattern else "dense")))

    @property
    def own_dense(self) -> "Candidate":
        """The same kernel run dense: of ours, torch's op itself."""
        return Candidate("torch" if self.how == OWN else self.how, self.op)

    def pattern_at(self, seq_len: int, *, is_causal: bool) -> DilatedPattern:
        return self.pattern or DilatedPattern((seq_len,), (1,), is_causal=is_causal)

    def as_json(self, sizes: Sizes, is_causal: bool, device: str) -> dict[str, Any]:
        """How every row about it begins."""
        pattern = self.pattern_at(sizes.seq_len, is_causal=is_causal)
        return {
            **call_json(sizes, pattern),
            "phase": pattern.phase,
            "device": device,
            "candidate": self.name,
            "backend": backend_on(device) if self.how == OWN else self.how,
            "is_dense": self.pattern is None,
        }


def backend_on(device: str) -> str:
    """This library's backend. On a CPU "cpu" stands in for OWN, which cannot run there."""
    return "cpu" if device == "cpu" else OWN


@contextmanager
def chosen(op: str) -> Iterator[None]:
    """Torch uses this attention op and no other. An implementation that is not installed is an error."""
    with ExitStack() as stack:
        if op:
            stack.enter_context(sdpa_kernel(OPS[op].backend))
            if OPS[op].implementation:
                activate_flash_attention_impl(OPS[op].implementation)
                stack.callback(restore_flash_attention_impl)
        yield


def attention(
    candidate: Candidate, query: Tensor, *, is_causal: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The candidate's attention for tensors like `query`, (B, N, H, D) each, to be called under `chosen`."""
    pattern = candidate.pattern_at(query.shape[1], is_causal=is_causal)
    if candidate.how == "torch":
        return lambda q, k, v: _dense(q, k, v, is_causal)
    if candidate.how == "torchscale":
        module = torchscale_attention(pattern, *query.shape[2:])
        return lambda q, k, v: module(
            *(x.flatten(2) for x in (q, k, v)), is_causal=pattern.is_causal
        )[0].unflatten(2, query.shape[2:])
    backend = backend_on(query.device.type)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = dilated_attention(q, k, v, pattern, backend=backend)
        assert isinstance(out, Tensor)
        return out

    return attend


def _dense(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2)

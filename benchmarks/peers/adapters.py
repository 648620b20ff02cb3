"""How each peer is called. An adapter is given the sizes of a call, and returns the peer's attention as a function.

This function takes query, key and value (B, N, H, D), with the rows that this rank owns. Changes that an adapter makes,
such as stand-ins for packages, stay until its process ends. The peer's row has the adapter's number of lines.
"""

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from ring_dilated_attention.attention import dilated_attention
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.ranks.context import ContextParallel

from . import stand_ins

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Call(NamedTuple):
    """A call that a peer is to compute. `documents`: the borders of packed documents, or None."""

    pattern: DilatedPattern
    seq_len: int  # the whole sequence's, over all ranks
    num_heads: int
    head_dim: int
    documents: tuple[int, ...] | None
    sharding: str
    lasting: ExitStack  # for contexts that an adapter enters: they are left after the last call


def this_library(call: Call) -> Attend:
    cu_seqlens = None if call.documents is None else torch.tensor(call.documents, dtype=torch.int32)
    parallel = ContextParallel(sharding=call.sharding, exchange="ring")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = dilated_attention(q, k, v, call.pattern, parallel=parallel, cu_seqlens=cu_seqlens)
        assert isinstance(out, Tensor)
        return out

    return attend


def dense(call: Call) -> Attend:
    mask = None
    if call.documents is not None:
        document = torch.bucketize(
            torch.arange(call.seq_len), torch.tensor(call.documents), right=True
        )
        mask = document[:, None] == document

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        options = {"is_causal": call.pattern.is_causal, "enable_gqa": q.shape[2] != k.shape[2]}
        out = scaled_dot_product_attention(query, key, value, mask, **options)
        return out.transpose(1, 2)

    return attend


def flex(call: Call) -> Attend:
    borders = torch.tensor(call.documents or (0, call.seq_len))
    document = torch.bucketize(torch.arange(call.seq_len), borders, right=True) - 1
    position = torch.arange(call.seq_len) - borders[document]

    def multiplicity(h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x, y = position[i], position[j]
        same = (document[i] == document[j]) & ((x >= y) | (not call.pattern.is_causal))
        count = torch.zeros_like(x, dtype=torch.float32)
        for w, r, _ in call.pattern.branches:
            count = (
                count
                + (same & (x // w == y // w) & (x % w % r == h % r) & (y % w % r == h % r)).float()
            )
        return count

    def add_log(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + multiplicity(h, i, j).log()

    def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return multiplicity(h, i, j) > 0

    blocks = create_block_mask(
        is_seen, None, call.num_heads, call.seq_len, call.seq_len, device="cpu"
    )
    compiled: Any = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        is_grouped = q.shape[2] != k.shape[2]
        return compiled(*rows, add_log, block_mask=blocks, enable_gqa=is_grouped).transpose(1, 2)

    return attend


def torchscale_attention(
    pattern: DilatedPattern, num_heads: int, head_dim: int, *, seq_parallel: bool = False
) -> Any:
    """LongNet's official module without its projections: query, key, value (B, N, H * D) -> (B, N, H * D), None.

    The forward equals this library's with phase="blocked", if each segment length divides the length of the sequence,
    and each rate its segment length. Otherwise the module counts padding as keys. Its backward leaves out the gradient
    of the branches' weights.
    """
    dilated: Any = importlib.import_module("torchscale.component.dilated_attention")
    multihead: Any = importlib.import_module("torchscale.component.multihead_attention")
    # The flash_attn package is not installed. torch's op replaces it.
    if multihead.flash_attn_func is None:
        multihead.flash_attn_func = stand_ins.flash
    arguments = SimpleNamespace(
        segment_length=list(pattern.segment_lengths),
        dilated_ratio=list(pattern.dilation_rates),
        flash_attention=True,
        seq_parallel=seq_parallel,
        multiway=False,
        xpos_rel_pos=False,
    )
    module = dilated.DilatedAttention(
        arguments, num_heads * head_dim, num_heads, self_attention=True
    )
    module.q_proj = module.k_proj = module.v_proj = module.out_proj = torch.nn.Identity()
    return module


def torchscale(call: Call) -> Attend:
    call.lasting.enter_context(mock.patch.object(torch.cuda, "current_device", return_value="cpu"))
    module = torchscale_attention(
        call.pattern,
        call.num_heads,
        call.head_dim,
        seq_parallel=dist.is_initialized() and dist.get_world_size() > 1,
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = module(*(x.flatten(2) for x in (q, k, v)), is_causal=call.pattern.is_causal)
        return out.unflatten(2, q.shape[2:])

    return attend


def dilated_attention_pytorch(call: Call) -> Attend:
    stand_ins.xformers()
    package: Any = importlib.import_module("dilated_attention_pytorch.dilated_attention")
    module = package.DilatedAttention(call.pattern.segment_lengths, call.pattern.dilation_rates)
    return lambda q, k, v: module(q, k, v, is_causal=call.pattern.is_causal)


def long_net(call: Call) -> Attend:
    stand_ins.packages("zeta", "zeta.nn", "zeta.nn.attention", "zeta.utils", "long_net")
    package: Any = importlib.import_module("long_net.attention")
    module = package.DilatedAttention(
        call.num_heads * call.head_dim,
        call.num_heads,
        call.pattern.dilation_rates[0],
        call.pattern.segment_lengths[0],
        causal=call.pattern.is_causal,
        device="cpu",
    )
    return lambda q, k, v: module(q.flatten(2)).unflatten(2, q.shape[2:])


def ring_attention_pytorch(call: Call) -> Attend:
    package: Any = importlib.import_module("ring_attention_pytorch.ring_flash_attention")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The peer's query head h reads key/value head h % G, and ours reads h // (H / G). Reorder the query heads.
        order = torch.arange(call.num_heads).view(k.shape[2], -1).T.flatten()
        out = package.ring_flash_attn(
            q[:, :, order], k, v, causal=call.pattern.is_causal, ring_reduce_col=True
        )
        return out[:, :, order.argsort()]

    return attend


def ring_flash_attn(call: Call) -> Attend:
    stand_ins.flash_attn()
    stand_ins.packages("ring_flash_attn")
    name = {"contiguous": "ring", "zigzag": "zigzag_ring", "stripe": "stripe"}[
        call.sharding
    ] + "_flash_attn"
    attend = getattr(importlib.import_module(f"ring_flash_attn.{name}"), f"{name}_func")
    return lambda q, k, v: attend(q, k, v, causal=call.pattern.is_causal)


def yunchang(call: Call, *, ulysses: int, attention: str = "FA", ring: str = "zigzag") -> Attend:
    if attention == "FA":
        stand_ins.flash_attn()
    package: Any = importlib.import_module("yunchang")
    kernels: Any = importlib.import_module("yunchang.kernels")
    rank, size = dist.get_rank(), dist.get_world_size()
    package.set_seq_parallel_pg(ulysses, size // ulysses, rank, size)
    kind = getattr(kernels.AttnType, attention)
    if ulysses == size:
        module = package.UlyssesAttention(dist.group.WORLD, attn_type=kind)
    else:
        module = package.LongContextAttention(ring_impl_type=ring, attn_type=kind)
    return lambda q, k, v: module(q, k, v, causal=call.pattern.is_causal)


def deepspeed_ulysses(call: Call) -> Attend:
    comm: Any = importlib.import_module("deepspeed.comm")
    layer: Any = importlib.import_module("deepspeed.sequence.layer")
    comm.init_distributed("gloo")
    module = layer.DistributedAttention(dense(call), dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: module(q, k, v, 0)


def torch_context_parallel(call: Call) -> Attend:
    parallel: Any = importlib.import_module("torch.distributed.tensor.experimental")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    buffers = [torch.empty(call.seq_len)]
    call.lasting.enter_context(
        parallel.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0])
    )
    # The context has replaced scaled_dot_product_attention in this module.
    functional: Any = torch.nn.functional

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        is_grouped = q.shape[2] != k.shape[2]
        out = functional.scaled_dot_product_attention(
            *rows, is_causal=call.pattern.is_causal, enable_gqa=is_grouped
        )
        return out.transpose(1, 2)

    return attend


def torch_private_ring(call: Call) -> Attend:
    ring: Any = importlib.import_module(
        "torch.distributed.tensor.experimental._context_parallel._attention"
    )
    ring._cp_options.rotate_method = ring._RotateMethod.ALL_TO_ALL
    ring._cp_options.enable_load_balance = call.sharding == "zigzag"
    is_causal = call.pattern.is_causal
    op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward_op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            world = dist.group.WORLD
            out, lse, *_ = ring._templated_ring_attention(
                world, 2, op, q, k, v, is_causal=is_causal, dropout_p=0.0
            )
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            return ring._templated_ring_attention_backward(
                dist.group.WORLD,
                2,
                backward_op,
                grads[0],
                "grad_out",
                *ctx.saved_tensors,
                is_causal,
                dropout_p=0.0,
            )[:3]

    return lambda q, k, v: Ring.apply(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

"""Dilated attention in models of PyTorch.

Styles for `parallelize_module`, and a function that replaces the attention of torch's transformer layers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from ..layers import MultiheadDilatedAttention
from ..models import LongNetLM
from ..pattern import DilatedPattern
from ..ranks.context import ContextParallel

__all__ = ["ShardHeads", "ShardSequence", "check_averaged", "replace_attention"]


class ShardSequence(ParallelStyle):
    """Context parallelism of a module's dilated attention: each rank of a mesh axis has a shard of the positions.

        parallelize_module(model, mesh["cp"], ShardSequence())
        parallelize_module(model, mesh["cp"], {"encoder": ShardSequence(shard_inputs=True, unshard_outputs=True)})

    A ShardSequence `style` makes one ContextParallel for each mesh, `style.contexts[mesh]`. All modules on that mesh
    share this ContextParallel.

    DDP and FSDP2 average gradients over the ranks. Averaged over the ranks, what a backward computes is the gradient of
    the mean of the ranks' losses.

    Args:
        sharding, exchange: as for `ContextParallel`.
        shard_inputs: the module receives whole tensors (B, N, ...), the same on every rank, and keeps this rank's rows.
            By default the module receives shards.
        unshard_outputs: the module returns whole tensors, the same on every rank. By default the module returns shards.
    """

    def __init__(
        self,
        *,
        sharding: str = "contiguous",
        exchange: str = "auto",
        shard_inputs: bool = False,
        unshard_outputs: bool = False,
    ) -> None:
        super().__init__()
        self.sharding, self.exchange = sharding, exchange
        self.shard_inputs, self.unshard_outputs = shard_inputs, unshard_outputs
        self.contexts: dict[DeviceMesh, ContextParallel] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attending = [
            child
            for child in module.modules()
            if isinstance(child, (MultiheadDilatedAttention, LongNetLM))
        ]
        if not attending:
            raise ValueError(
                f"{type(module).__name__} has no dilated attention to shard along the sequence: make it of "
                "MultiheadDilatedAttention, or call replace_attention first."
            )
        if device_mesh not in self.contexts:
            self.contexts[device_mesh] = ContextParallel(
                device_mesh, sharding=self.sharding, exchange=self.exchange
            )
        parallel = self.contexts[device_mesh]
        for child in attending:
            if isinstance(child, MultiheadDilatedAttention):
                child.share(parallel)
            else:
                child.parallel = parallel

        if self.shard_inputs:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: _each(parallel.shard, (args, kwargs)), with_kwargs=True
            )
        if self.unshard_outputs:
            module.register_forward_hook(lambda _, args, out: _each(parallel.unshard, out))
        return module


class ShardHeads(ParallelStyle):
    """Tensor parallelism of a MultiheadDilatedAttention: each rank of a mesh axis computes some of its heads.

        parallelize_module(block, mesh["tp"], {"attention": ShardHeads()})

    Inputs and outputs are whole tensors, the same on every rank. A rank keeps only the parameters of its own heads, so
    load a checkpoint before you call parallelize_module. A head computes the same as on one device. Which positions of
    a segment a head reads (the head's phase) depends on the head's number in the whole layer, not on its number on the
    rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MultiheadDilatedAttention):
            raise ValueError(
                f"ShardHeads is for MultiheadDilatedAttention, got {type(module).__name__}."
            )
        size = device_mesh.size()
        rank = device_mesh.get_local_rank()
        num_groups = module.num_kv_heads
        ratio = module.num_heads // num_groups
        if num_groups < size:
            raise ValueError(
                f"{num_groups} key/value heads for {size} ranks: use a mesh axis of at most {num_groups}."
            )
        groups = torch.arange(num_groups).tensor_split(size)[rank]
        module_of_rank = module.held(range(int(groups[0]) * ratio, (int(groups[-1]) + 1) * ratio))
        # Change the given module in place, because parallelize_module keeps this module and its hooks.
        for name in ("_parameters", "_modules", "heads_held", "_split_sizes"):
            setattr(module, name, getattr(module_of_rank, name))

        def summed_gradient(x: Tensor) -> Tensor:
            if not x.requires_grad:
                return x
            whole = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            return whole.to_local(grad_placements=[Partial()])

        def summed(x: Tensor) -> Tensor:
            terms = DTensor.from_local(x, device_mesh, [Partial()], run_check=False)
            return terms.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_pre_hook(
            lambda _, args, kwargs: _each(summed_gradient, (args, kwargs)), with_kwargs=True
        )
        module.register_forward_hook(lambda _, args, out: _each(summed, out))
        return module


def _each(change: Callable[[Tensor], Tensor], nested: Any) -> Any:
    """Apply `change` to every tensor (B, N, ...) in nested tuples, lists and dicts, and return the result.

    Values that are no tensors, and tensors of fewer than two dims, stay as they are. A tensor that occurs twice is
    changed once.
    """
    changed: dict[int, Tensor] = {}

    def apply(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        if id(value) not in changed:
            changed[id(value)] = change(value)
        return changed[id(value)]

    return tree_map(apply, nested)


def check_averaged(module: nn.Module, parallel: ContextParallel, *, by_hand: bool = False) -> None:
    """Check that the ranks that share a sequence also average their gradients.

    Call this function after DDP or fully_shard, and outside of a forward. Two things are not checked: the averaging
    over replicas (ranks with different sequences), and the process groups of FullyShardedDataParallel's hybrid
    strategies.

    Args:
        by_hand: pass True if your own loop, or DeepSpeed, averages some gradients. Then it is no error if neither
            DDP nor FSDP averages the gradient of a parameter.

    Raises:
        ValueError: if a rank that shares a sequence is missing in the process group of DDP or FSDP, or in the mesh of
            a parameter. Without `by_hand`, also if neither DDP nor FSDP averages the gradient of a parameter.
    """
    sharing = set(parallel.ranks.members)
    check_meshes(module, parallel)
    wrappers: list[Any] = []
    for name, child in module.named_modules():
        has_one_group = isinstance(child, DistributedDataParallel)
        if isinstance(child, FullyShardedDataParallel):
            has_one_group = "HYBRID" not in child.sharding_strategy.name
        if has_one_group:
            averaging = dist.get_process_group_ranks(child.process_group)
            if not sharing <= set(averaging):
                raise ValueError(
                    f"{type(child).__name__} of {name or 'the module'} averages over the ranks {averaging}, but the "
                    f"ranks {sorted(sharing)} share each sequence, and nobody would average their gradients. Leave "
                    "process_group out, which takes all ranks."
                )
        if isinstance(child, FSDPModule):
            # Turn parameters into DTensors again: after a forward without a backward they may be plain tensors.
            child.reshard()
        if isinstance(child, (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)):
            wrappers.append(child)
    if not sharing or by_hand:
        return
    averaged = {parameter for wrapper in wrappers for parameter in _averaged_by(wrapper)}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter not in averaged:
            raise ValueError(
                f"{name} lies outside of the modules that DDP or fully_shard was called with, or they were told to "
                "ignore this parameter. So nobody would average its gradients: wrap the whole module, or no longer "
                "ignore the parameter. If your loop averages the gradients over all ranks, say "
                "check_averaged(..., by_hand=True)."
            )


def _averaged_by(wrapper: Any) -> Iterator[nn.Parameter]:
    """The parameters whose gradients `wrapper` (DDP or FSDP) averages: all except those that it was told to ignore."""
    for name, parameter in wrapper.named_parameters():
        if isinstance(wrapper, DistributedDataParallel):
            is_averaged = name.removeprefix("module.") not in wrapper.parameters_to_ignore
        else:
            is_averaged = isinstance(parameter, DTensor) or not isinstance(wrapper, FSDPModule)
        if is_averaged:
            yield parameter


def check_meshes(module: nn.Module, parallel: ContextParallel) -> None:
    """Raise ValueError if a rank that shares a sequence is missing in the mesh over which FSDP2 shards a parameter.

    Parameters that are plain tensors are not checked. During a forward all parameters of FSDP2 are plain tensors.
    """
    sharing = set(parallel.ranks.members)
    if not sharing or not any(isinstance(child, FSDPModule) for child in module.modules()):
        return
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        sharded = set(parameter.device_mesh.mesh.flatten().tolist())
        if not sharing <= sharded:
            raise ValueError(
                f"{name} is sharded over the ranks {sorted(sharded)}, but the ranks {sorted(sharing)} share each "
                "sequence, and nobody would average their gradients. Shard over both axes: fully_shard(module, "
                'mesh=mesh["dp", "cp"]), which replicates over the first and shards over the second.'
            )


def replace_attention(
    module: nn.Module,
    pattern: DilatedPattern,
    *,
    rotary: bool | float | None = None,
    parallel: ContextParallel | None = None,
) -> nn.Module:
    """Replace the self-attention of every nn.TransformerEncoderLayer and nn.TransformerDecoderLayer in a module.

    The module is changed in place and returned. Its parameters stay the same objects under the same names, so that
    optimizers and checkpoints still fit. A decoder's cross-attention stays.

    Call the module without src_mask and tgt_mask: the pattern decides whether attention is causal.

    Args:
        pattern: which positions a query attends to.
        rotary: as for MultiheadDilatedAttention. Rotary embeddings have no parameters. None keeps the rotary embedding
            of the replaced attention (torch's attention has no rotary embedding).
        parallel: the ranks that share the sequences, as for MultiheadDilatedAttention.

    If the replaced attention is a MultiheadDilatedAttention already, its sub_layernorm and its backend are kept.

    Raises:
        ValueError: if the module has no layer of these two classes, or if an attention cannot be replaced (dropout,
            batch_first=False, extra key/value rows). The module is then unchanged.
    """
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    layers: dict[str, Any] = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, kinds)
    }
    if not layers:
        raise ValueError(
            f"{type(module).__name__} has no nn.TransformerEncoderLayer or nn.TransformerDecoderLayer: construct your "
            "own layers with MultiheadDilatedAttention, whose state_dict is that of nn.MultiheadAttention."
        )
    # Make all new attentions before any attention is replaced, so that an error leaves the module unchanged.
    attentions = [
        _dilated(name, layer.self_attn, pattern, rotary, parallel) for name, layer in layers.items()
    ]
    for layer, attention in zip(layers.values(), attentions, strict=True):
        layer.self_attn = attention
    for child in module.modules():
        if isinstance(child, nn.TransformerEncoder):
            # Switch off nested tensors: with them torch takes a fast path that calls torch's own attention.
            child.use_nested_tensor = False
    return module


def _dilated(
    layer: str,
    attention: Any,
    pattern: DilatedPattern,
    rotary: bool | float | None,
    parallel: ContextParallel | None,
) -> nn.Module:
    """The MultiheadDilatedAttention that replaces `attention`, with the same parameters. layer: the layer's name.

    Raises ValueError for an attention that cannot be replaced.
    """
    name = f"{layer}.self_attn".lstrip(".")
    if why := _why_not(name, attention):
        raise ValueError(f"{name} {why}.")
    if rotary is None:
        rotary = getattr(attention, "rotary_base", None) or False
    replaced = MultiheadDilatedAttention(
        attention.embed_dim,
        attention.num_heads,
        pattern,
        num_kv_heads=getattr(attention, "num_kv_heads", None),
        bias=attention.in_proj_bias is not None,
        rotary=rotary,
        parallel=parallel,
        backend=getattr(attention, "backend", "auto"),
        device="meta",
    )
    replaced.in_proj_weight = attention.in_proj_weight
    replaced.in_proj_bias = attention.in_proj_bias
    replaced.out_proj.weight = attention.out_proj.weight
    replaced.out_proj.bias = attention.out_proj.bias
    replaced.sub_layernorm = getattr(attention, "sub_layernorm", None)
    return replaced.train(attention.training)


def _why_not(name: str, attention: Any) -> str | None:
    if isinstance(attention, MultiheadDilatedAttention):
        return None
    if not isinstance(attention, nn.MultiheadAttention):
        return f"is a {type(attention).__name__}, not torch's nn.MultiheadAttention"
    if attention.dropout:
        return (
            f"has dropout={attention.dropout}, and dilated attention has none: set {name}.dropout = 0.0, or make the "
            "layers with dropout=0.0"
        )
    if not attention.batch_first:
        return "has batch_first=False: make the layers with batch_first=True"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "has extra key/value rows (add_bias_kv, add_zero_attn), which dilated attention does not take"
    if not attention._qkv_same_embed_dim:
        return "has keys and values of other widths than its queries"
    return None


def held_heads(module: nn.Module, num_held: int, num_heads: int) -> range | None:
    """The numbers of the query heads that this rank computes under tensor parallelism (`ColwiseParallel`).

    None if this rank computes all heads of the layer. The shards of the layer's parameters tell which heads this rank
    has. Raises ValueError if the shards do not tell.
    """
    if num_held == num_heads:
        return None
    ranks_and_sizes = set()
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard():
                ranks_and_sizes.add((mesh.get_local_rank(axis), mesh.size(axis)))
    if len(ranks_and_sizes) == 1:
        [(rank, size)] = ranks_and_sizes
        if size * num_held == num_heads:
            return range(rank * num_held, (rank + 1) * num_held)
    sharded = ", ".join(f"{rank} of {size}" for rank, size in sorted(ranks_and_sizes)) or "none"
    raise ValueError(
        f"{type(module).__name__} computes {num_held} of {num_heads} heads. Phases depend on which heads these are, "
        f"and the parameters do not say (their shards: {sharded}). Shard the projections over one mesh axis, with "
        "equally many heads on each rank."
    )

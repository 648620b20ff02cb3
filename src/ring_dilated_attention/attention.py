"""dilated_attention: validate -> handshake -> plan -> execute.

Forward and backward are a pair of custom ops that know the ranks by the name of their group, so that compiled graphs
hold them whole. B batch, N positions, H query heads, G key/value heads, D head dim.
"""

import math
import numbers
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .kernels.choose import BACKENDS, choose, reasons
from .kernels.contract import BackwardRows
from .pattern import DilatedPattern
from .plan.heads import held_heads
from .plan.job import Job
from .plan.sharding import Cut, documents_of
from .plan.sizes import Sizes
from .ranks.borders import validate_cu_seqlens
from .ranks.call import Call
from .ranks.context import ContextParallel, ExchangeError, context_named, refuse
from .ranks.origin import origin_of, why_foreign
from .ranks.ranks import Ranks
from .run.append import append, append_now
from .run.dilated_cache import DilatedCache, check_call
from .run.views import accumulator_dtype, with_unit_stride


def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    *,
    parallel: ContextParallel | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    heads_held: range | None = None,
    num_heads: int | None = None,
    cache: DilatedCache | None = None,
    lengths: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact dilated attention (LongNet, arXiv 2307.02486): one softmax over the keys of all branches.

    out[i] = softmax_j(q_i k_j * scale + log M[h, i, j]) v_j, where M[h, i, j] is the number of branches in which query
    i of head h sees key j. A (query, head) that no branch covers has out = 0 and lse = -inf.

    Args:
        query: (B, N, H, D), float64, float32, bfloat16 or float16. Under `parallel` this rank's rows.
        key, value: (B, N, G, D) of the same dtype and device; H must be a multiple of G (grouped-query attention: query
            head h reads key/value head h // (H / G)).
        pattern: who attends whom.
        parallel: the ranks that share the sequence. Every rank must make the call, and run its backward if one does:
            autograd passes by a call that the loss does not depend on. On a rank that has no use for its output, add
            0 * out.sum() to the loss.
        cu_seqlens: borders (0, ..., N) of packed documents, int32, for a batch of 1. Positions and segments start anew
            at each. Under `parallel` they are global and the same on every rank.
        scale: of the scores; D ** -0.5 by default.
        backend: "cpu", "sdpa" (CUDA; `torch.nn.attention.sdpa_kernel` selects among torch's ops), "triton" or
            "triton-fused" (all branches at once wherever one device holds the sequence: least memory, maybe more
            work; both by name only, until they have run on a GPU), or "auto".
        return_lse: also return the logsumexp of the scores; gradients flow through it too.
        heads_held, num_heads: for tensors that hold some heads of a layer (tensor parallelism): which query heads, as
            range(3, 6), of how many in all. Phases go by the head of the layer.
        cache: the sequences so far. The N rows are appended to them, at `cache.position`, and see them. No gradient.
        lengths: with a cache, (B,) integers: how many of its N rows each batch entry appends. The rest is padding, with
            out = 0 and lse = -inf.

    Returns:
        out (B, N, H, D) in the input's dtype, or (out, lse) with lse (B, N, H) in float32 (float64 for float64).

    Raises:
        ValueError: for inputs that do not fit, on every rank of `parallel`, before anything is sent.
        ExchangeError: when a rank does not come, within the timeout of `parallel`.
    """
    try:
        check_cuts(parallel, query=query, key=key, value=value)
        query, key, value = map(autocast, (query, key, value))
        heads = _validate(query, key, value, pattern, parallel, cu_seqlens, scale, backend, heads_held, num_heads)
        if not isinstance(return_lse, bool):
            raise ValueError(f"return_lse must be True or False, got {return_lse!r}.")
        num_heads = query.shape[2] if num_heads is None else num_heads
        check_call(cache, query, key, value, pattern, parallel, cu_seqlens, lengths, heads, num_heads)
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        needs_grad = "".join(n for n, x in zip("qkv", (query, key, value), strict=True) if x.requires_grad)
        query, key, value = map(with_unit_stride, (query, key, value))
    except Exception as error:  # whatever it is: the others would wait
        if isinstance(parallel, ContextParallel):
            refuse(parallel.key, str(error) or type(error).__name__)
        raise
    if cache is not None:
        out, lse = _append(query, key, value, cache, lengths, scale, backend)
        return (out, lse) if return_lse else out
    out, lse, number = _forward(
        *(query, key, value, cu_seqlens),
        pattern.text,
        scale,
        backend,
        parallel.key if parallel is not None else "",
        needs_grad if torch.is_grad_enabled() else "",
        return_lse,
        heads.start,
        num_heads,
    )
    if parallel is not None and torch.compiler.is_compiling():
        parallel.kept.add_(number)  # a graph drops a call that it does not use; a tensor that outlives it is a use
    return (out, lse) if return_lse else out


def check_cuts(parallel: ContextParallel | None, **tensors: object) -> None:
    """Raise ValueError for a shard that was cut otherwise than `parallel` cuts; warn of one without ranks."""
    for name, x in tensors.items():
        if isinstance(parallel, ContextParallel):
            if failure := why_foreign(name, x, parallel.ranks):
                raise ValueError(f"{failure}.")
        elif parallel is None and (origin := origin_of(x)) is not None:
            text = f"{name} is {origin}, and without parallel= it is taken for a whole sequence."
            warnings.warn(text, stacklevel=4)
            return


def _append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: DilatedCache,
    lengths: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    plan = cache.plan
    call = Call(plan.pattern, scale, backend, "", True, plan.heads, plan.num_heads)
    tensors = (call.scaled(query), key, value, cache.memory, cache.progress, lengths)
    if not torch.compiler.is_compiling():  # an op costs a quarter of a token where little is cached
        return append_now(plan, backend, call.kernel_scale, *tensors)
    limits = (plan.max_len, plan.keep)
    return append(*tensors, plan.pattern.text, plan.heads.start, plan.num_heads, *limits, call.kernel_scale, backend)


def autocast(x: Any) -> Any:
    """As torch's own attention under autocast: floating types but float64 take the autocast type."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def save_attention() -> tuple[Any, Any]:
    """`context_fn` for torch.utils.checkpoint: recompute everything but attention, whose out and lse are kept.

        checkpoint(block, x, use_reentrant=False, context_fn=save_attention)

    Without it the recomputation would send all chunks a second time.
    """

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is torch.ops.ring_dilated_attention.forward.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@dataclass(frozen=True)
class Explanation:
    """Which kernel and exchange a call would use, and why not the others."""

    kernel: str
    exchange: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"kernel: {self.kernel}", f"exchange: {self.exchange}"]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.reasons.items()])


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    *,
    parallel: ContextParallel | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    lengths: Sequence[int] | None = None,
) -> Explanation:
    """Which kernel and exchange `dilated_attention` would use on these tensors, and why. Sends nothing.

    Args:
        lengths: the number of positions of every rank. By default those that `parallel` was made with or, since nobody
            is asked, as many for each as this rank has.

    Raises:
        ValueError: where the call would.
    """
    heads = _validate(query, key, value, pattern, parallel, cu_seqlens, None, backend, None, None)
    kernel = choose(backend, query)
    against = {name: reason or BACKENDS[name].ONLY_BY_NAME for name, reason in reasons(query).items()}
    first = "the first that can serve these tensors"
    found = _why(against, kernel.NAME, first if backend == "auto" else "asked for")
    ops = kernel.ops(query)
    op = next((name for name, reason in ops.items() if reason is None), None)
    if ops and op is None:
        listed = "; ".join(f"{name} {reason}" for name, reason in ops.items())
        raise ValueError(f"backend={kernel.NAME!r} has no op for these tensors: {listed}. Enable another.")
    if op is not None:
        found |= {f"{kernel.NAME} {name}": reason for name, reason in _why(ops, op, first).items()}
    ranks: Ranks = _ALONE if parallel is None else parallel.ranks
    num_rows, num_kv_heads = query.shape[1], key.shape[2]
    if lengths is None:
        given = None if parallel is None else parallel.cut.lengths
        lengths = given or [num_rows] * ranks.world_size
    documents = documents_of(None if cu_seqlens is None else cu_seqlens.tolist(), sum(lengths))
    sizes = Sizes(query.shape[0], query.shape[3], query.element_size())
    job = Job(pattern, ranks.shards(lengths), len(heads), num_kv_heads, documents)
    exchange, found["exchange"] = ranks.choose(job, sizes)
    if kernel.choose_pass is not None and exchange == "none":
        found["branches"] = kernel.choose_pass(pattern, job.borders).reason
    return Explanation(kernel.NAME if op is None else f"{kernel.NAME} ({op})", exchange, found)


def _why(against: dict[str, str | None], chosen: str, how: str) -> dict[str, str]:
    """Why each was chosen or not."""
    passed_by = "can serve these tensors, but another was chosen"
    return {name: f"chosen: {how}" if name == chosen else reason or passed_by for name, reason in against.items()}


def _validate(
    query: Any,
    key: Any,
    value: Any,
    pattern: Any,
    parallel: Any,
    cu_seqlens: Any,
    scale: Any,
    backend: Any,
    heads_held: Any,
    num_heads: Any,
) -> range:
    """Everything that can be said before ranks talk to each other. Returns the query heads that the tensors hold."""
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor (batch, seq, heads, head_dim), got {type(x).__name__}.")
        if x.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}. Convert it with .to_dense().")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, seq, heads, head_dim), got {x.dim()} dimensions: {tuple(x.shape)}."
            )
    if not isinstance(pattern, DilatedPattern):
        raise ValueError(f"pattern must be a DilatedPattern, got {pattern!r}.")
    if parallel is not None and not isinstance(parallel, ContextParallel):
        raise ValueError(f"parallel must be a ContextParallel or None, got {parallel!r}.")
    for name in ("dtype", "device"):
        values = {n: getattr(x, name) for n, x in tensors.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{n} has {v}" for n, v in values.items())
            raise ValueError(f"query, key and value must share one {name}: {listed}. Convert them with .to().")
    batch, seq_len, num_held, head_dim = query.shape
    if key.shape != value.shape:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} must have the same shape.")
    if key.shape[:2] != query.shape[:2] or key.shape[3] != head_dim:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must agree in batch, seq and head_dim; only the "
            "number of heads may differ (this is self-attention)."
        )
    if not (batch and num_held and head_dim):
        raise ValueError(f"query {tuple(query.shape)} has an empty batch, heads or head_dim.")
    heads = held_heads(num_held, max(num_held // max(key.shape[2], 1), 1), heads_held, num_heads)
    pattern.check_heads(num_heads or num_held, key.shape[2] * (num_heads or num_held) // num_held)
    _validate_scale(scale, torch.float64 if query.dtype == torch.float64 else torch.float32)
    if cu_seqlens is not None:
        validate_cu_seqlens(cu_seqlens, batch)
    choose(backend, query)
    if parallel is None and num_held > seq_len and num_held > 256:  # a shard may well be that short
        warnings.warn(
            f"query has {num_held} heads and {seq_len} positions: (batch, heads, seq, head_dim) was probably meant. "
            "The layout is (batch, seq, heads, head_dim).",
            stacklevel=3,
        )
    return heads


def _validate_scale(scale: Any, dtype: torch.dtype) -> None:
    is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    try:
        is_finite = is_number and abs(float(scale)) < math.inf
    except OverflowError:
        is_finite = False
    if scale is not None and not is_finite:
        raise ValueError(f"scale must be a finite number or None, got {scale!r}.")
    if scale is not None and abs(float(scale)) > torch.finfo(dtype).max:
        raise ValueError(
            f"scale={float(scale):g} is beyond {torch.finfo(dtype).max:.1e}, the largest {dtype} number, in which "
            "scores are made. Pass float64 tensors, or a smaller scale."
        )


@torch.library.custom_op("ring_dilated_attention::forward", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    pattern: str,
    scale: float,
    backend: str,
    parallel: str,
    needs_grad: str,
    return_lse: bool,
    first_head: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the number of the call, by which its backward is recognised."""
    call = _call(pattern, scale, backend, needs_grad, return_lse, first_head, num_heads, query)
    out, lse, number = _ranks(parallel).forward(call, query, key, value, cu_seqlens)
    return out, lse, torch.tensor(number, device="cpu")


def _call(
    pattern: str,
    scale: float,
    backend: str,
    needs_grad: str,
    return_lse: bool,
    first_head: int,
    num_heads: int,
    query: Tensor,
) -> Call:
    heads = range(first_head, first_head + query.shape[2])
    return Call(DilatedPattern.from_text(pattern), scale, backend, needs_grad, return_lse, heads, num_heads)


_ALONE = Ranks(Cut("contiguous", 1))


def _ranks(parallel: str) -> Ranks:
    context = context_named(parallel)
    return _ALONE if context is None else context.ranks


@_forward.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=accumulator_dtype(query.dtype))
    return query.new_empty(query.shape), lse, torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("ring_dilated_attention::backward", mutates_args=())
def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    number: Tensor,
    cu_seqlens: Tensor | None,
    pattern: str,
    scale: float,
    backend: str,
    parallel: str,
    needs_grad: str,
    return_lse: bool,
    first_head: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(pattern, scale, backend, needs_grad, return_lse, first_head, num_heads, query)
    rows = BackwardRows(with_unit_stride(dout), dlse, query, key, value, out, lse)
    return _ranks(parallel).backward(call, int(number), rows, cu_seqlens)


@_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, cu_seqlens, *rest = inputs
    out, lse, number = output
    ctx.save_for_backward(query, key, value, out, lse, number, cu_seqlens)
    ctx.rest = rest
    ctx.context = context_named(rest[3])  # it must live as long as the graph
    ctx.mark_non_differentiable(number)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple:
    try:
        query, key, value, out, lse, number, cu_seqlens = ctx.saved_tensors
    except RuntimeError as error:  # somebody has written into them: the others would wait
        if not isinstance(error, ExchangeError):
            refuse(ctx.rest[3], str(error))
        raise
    dout = torch.zeros_like(out) if dout is None else dout
    grads = _backward(dout, dlse, query, key, value, out, lse, number, cu_seqlens, *ctx.rest)
    return *grads, *[None] * (1 + len(ctx.rest))


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "dilated attention has no second derivative: its backward cannot be differentiated. "
        "Call backward without create_graph=True."
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)

"""The call `dilated_attention`. It checks its inputs, makes sure that all ranks make the same call, and runs the call.

Forward, backward and appending to a cache are custom ops, which torch.compile does not trace. An op takes tensors, and
a string (`Call.text`) that encodes most of the other arguments.

B batch, N positions, H query heads, G key/value heads, D head dim.
"""

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..kernels.contract import BackwardRows
from ..pattern import DilatedPattern
from ..plan.cache_plan import plan_cache
from ..ranks.call import Call, ForwardState
from ..ranks.failures import ExchangeError
from ..ranks.named import NamedContext, context_named, refuse
from ..ranks.ranks import ALONE, Ranks, warn_of_forgotten_parallel
from ..run.append import append
from ..run.dilated_cache import DilatedCache
from ..run.views import accumulator_dtype, with_unit_stride
from .op import define_op
from .sinks import with_sinks
from .validate import (
    autocast,
    call_of,
    check_cache,
    on_host,
    refuse_others,
    refuse_tangents,
    refuse_transforms,
)

if TYPE_CHECKING:
    from ..ranks.context import ContextParallel


@overload
def dilated_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: DilatedPattern, *, parallel: "ContextParallel | None" = None,
    cu_seqlens: Tensor | None = None, scale: float | None = None, sinks: Tensor | None = None, backend: str = "auto",
    return_lse: Literal[False] = False, heads_held: range | None = None, num_heads: int | None = None,
    cache: DilatedCache | None = None, lengths: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def dilated_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: DilatedPattern, *, parallel: "ContextParallel | None" = None,
    cu_seqlens: Tensor | None = None, scale: float | None = None, sinks: Tensor | None = None, backend: str = "auto",
    return_lse: Literal[True], heads_held: range | None = None, num_heads: int | None = None,
    cache: DilatedCache | None = None, lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def dilated_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: DilatedPattern, *, parallel: "ContextParallel | None" = None,
    cu_seqlens: Tensor | None = None, scale: float | None = None, sinks: Tensor | None = None, backend: str = "auto",
    return_lse: bool = False, heads_held: range | None = None, num_heads: int | None = None,
    cache: DilatedCache | None = None, lengths: Tensor | None = None, **others: object,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Exact dilated attention (LongNet, arXiv 2307.02486): one softmax over the keys of all branches.

    A branch of the pattern is a segment length with a dilation rate. M[h, i, j] is the number of branches in which
    query i of head h attends to key j:

        out[i] = softmax_j(q_i k_j * scale + log M[h, i, j]) v_j

    If a query attends to no key in any branch, its out is 0 and its lse is -inf. With `sinks` its lse is the logit of
    its head instead.

    Args:
        query: (B, N, H, D), float64, float32, bfloat16 or float16. Under `parallel` this rank's rows.
        key, value: (B, N, G, D) of the same dtype and device; H must be a multiple of G (grouped-query attention: query
            head h reads key/value head h // (H / G)).
        pattern: which keys each query attends to.
        parallel: the ranks that share the sequence. Every rank must make the call. Either all ranks run the backward or
            none does: a rank that has no use for the output adds 0 * out.sum() to its loss.
        cu_seqlens: borders (0, ..., N) of packed documents, int32, for a batch of 1. Positions and segments start anew
            at each border. Under `parallel` the borders are those of the whole sequence, the same on every rank.
        scale: the factor that multiplies q_i k_j; D ** -0.5 by default.
        sinks: (H,), a learned logit for each query head. The head's softmax gets one more key, whose score is the logit
            and whose value is 0 (as in gpt-oss). Gradients flow to the logits.
        backend: "auto", "cpu" or "sdpa" (CUDA; `torch.nn.attention.sdpa_kernel` selects among torch's ops). No GPU has
            run "sdpa" yet.
        return_lse: also return the logsumexp of the scores, sinks included; gradients flow through it too.
        heads_held, num_heads: for tensors that hold only some heads of a layer (tensor parallelism). heads_held is the
            range of these query heads, such as range(3, 6); num_heads is the number of query heads in the layer. In a
            branch of dilation rate r a head reads one of every r positions: which position depends on the head's number
            in the layer.
        cache: a `DilatedCache`, which holds the rows of earlier calls. This call appends its N rows at
            `cache.position`, and has no gradient.
        lengths: (B,) integers, only with a cache: each batch entry appends only this many of its N rows. The rows
            after these are padding. A padding row gets the out and lse of a query that attends to no key.

    Returns:
        out (B, N, H, D) in the input's dtype, or (out, lse) with lse (B, N, H) in float32 (float64 for float64).

    Raises:
        ValueError: for inputs that do not fit. Under `parallel` every rank raises it, before anything is sent.
        ExchangeError: if another rank dies or does not make the call. The error comes within the timeout of `parallel`.
        TypeError: for any other keyword argument. For an argument of torch's attention, such as `is_causal`, the error
            says what to pass instead.
        NotImplementedError: for second derivatives, and for derivatives by torch.func (`grad`, `vjp`, `jvp`).
    """
    try:
        refuse_others("dilated_attention", others)
        cu_seqlens = on_host(cu_seqlens)
        query, key, value = rows = autocast(query), autocast(key), autocast(value)
        call = call_of(
            rows,
            pattern,
            parallel,
            cu_seqlens,
            scale,
            backend,
            return_lse,
            heads_held,
            num_heads,
            sinks,
        )
        check_cache(cache, call, query, key, parallel, cu_seqlens, lengths)
        query, key, value = map(with_unit_stride, rows)
        # Do not warn a caller who passes cu_seqlens: its last border must be N, so the N rows are meant to be the whole
        # sequence.
        if parallel is None and cache is None and cu_seqlens is None:
            warn_of_forgotten_parallel(query.shape[1])
    except Exception as error:
        # Tell the other ranks of the error, because they would otherwise wait for this rank.
        if isinstance(parallel, NamedContext):
            refuse(parallel.key, str(error) or type(error).__name__)
        raise
    if cache is None:
        try:
            out, lse, state = _forward(query, key, value, cu_seqlens, call.text)
        except RuntimeError as error:
            refuse_transforms(error)
            raise
        if parallel is not None and torch.compiler.is_compiling():
            # Use `state`, a result of the call above, because torch.compile drops a call if nothing uses its results.
            parallel.ranks.compiled_calls.add_(state[0])
    elif torch.compiler.is_compiling():
        out, lse = _append(
            query,
            key,
            value,
            cache.memory,
            cache.progress,
            lengths,
            call.text,
            cache.plan.max_len,
            cache.plan.keep,
        )
    else:
        # Call `append` and not the op `_append`. With a short cache, the op's overhead would be a quarter of the time
        # that a token takes.
        out, lse = append(
            cache.plan,
            call.backend,
            call.kernel_scale,
            call.scaled(query),
            key,
            value,
            cache.memory,
            cache.progress,
            lengths,
        )
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def save_attention() -> tuple[Any, Any]:
    """`context_fn` for torch.utils.checkpoint: keep attention's out and lse, and recompute everything else.

        checkpoint(block, x, use_reentrant=False, context_fn=save_attention)

    Without this `context_fn` the recomputation would make ranks send their keys and values a second time.
    """

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is torch.ops.ring_dilated_attention.forward.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _ranks(call: Call) -> Ranks:
    return context_named(call.context).ranks if call.context else ALONE


def _run_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, call: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse, and a CPU tensor that holds the `ForwardState` for the backward. call: the text of a `Call`."""
    arguments = Call.from_text(call)
    out, lse, state = _ranks(arguments).forward(arguments, query, key, value, cu_seqlens)
    return out, lse, state.tensor


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, call: str
) -> tuple[Tensor, Tensor, Tensor]:
    num_borders = 0 if cu_seqlens is None else cu_seqlens.shape[0]
    return *_fake_append(query), torch.empty(2 + num_borders, dtype=torch.int64, device="cpu")


def _run_backward(
    dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    state: Tensor, call: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    arguments = Call.from_text(call)
    ranks = _ranks(arguments)
    with ranks.refusing():
        rows = BackwardRows(with_unit_stride(dout), dlse, query, key, value, out, lse)
    return ranks.backward(arguments, ForwardState.from_tensor(state), rows)


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, _, ctx.call = inputs
    ctx.save_for_backward(query, key, value, *output)
    key = Call.from_text(ctx.call).context
    # Keep the `ContextParallel` alive while autograd's graph exists.
    ctx.context = context_named(key) if key else None
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple:
    try:
        refuse_tangents(dout, dlse)
        query, key, value, out, lse, state = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
    except RuntimeError as error:
        # Tell the other ranks of the error, because they wait for this rank. For example, torch raises an error here
        # if a saved tensor was changed in place.
        if ctx.context is not None and not isinstance(error, ExchangeError):
            refuse(ctx.context.key, str(error))
        raise
    return *_backward(dout, dlse, query, key, value, out, lse, state, ctx.call), None, None


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "dilated attention has no second derivative: call backward without create_graph=True."
    )


_forward = define_op("forward", _run_forward, _fake_forward, _differentiate, _save)
_backward = define_op("backward", _run_backward, _fake_backward, _refuse)


@torch.library.custom_op("ring_dilated_attention::append", mutates_args=("memory", "progress"))
def _append(
    query: Tensor, key: Tensor, value: Tensor, memory: Tensor, progress: Tensor, lengths: Tensor | None,
    call: str, max_len: int | None, keep: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`append` as a custom op, which compiled code calls. The op reads the position from `progress`, so one compiled
    graph works at every position.

    memory, progress: tensors of the cache, which the op changes in place. call: the text of a `Call`. max_len, keep:
    values from the cache's plan.
    Returns out and lse of the appended rows.
    """
    arguments = Call.from_text(call)
    num_kv_heads = arguments.num_kv_heads(key.shape[2])
    plan = plan_cache(
        arguments.pattern, arguments.num_heads, num_kv_heads, max_len, keep, arguments.heads_held
    )
    return append(
        plan,
        arguments.backend,
        arguments.kernel_scale,
        arguments.scaled(query),
        key,
        value,
        memory,
        progress,
        lengths,
    )


@_append.register_fake
def _fake_append(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(
        query.shape[:3], dtype=accumulator_dtype(query.dtype)
    )

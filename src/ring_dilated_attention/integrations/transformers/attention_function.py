"""The attention function that transformers calls for "dilated", and the mask function that belongs to it.

transformers passes tensors (B, H, M, D), and all keywords that the model gives its attention. Keywords in REFUSED would
change the attention, so they are refused. All other keywords are ignored, because they do not change the attention.

B batch, H query heads, G key/value heads, M query rows, S key rows (M, or more if a cache holds earlier rows), D head
dim, T rows that are not padding.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ...attention import dilated_attention
from ...pattern import DilatedPattern
from ...ranks.context import ContextParallel
from ...ranks.named import called_by, refuse
from ..torch import held_heads
from .cache import MARK, BoundedLayer
from .config import is_as_trained, layer_pattern, pattern_of

# Keywords that a model may pass, and why they are refused unless they are None or False.
REFUSED = {
    "sliding_window": "a sliding window is another pattern; set config.sliding_window=None (and layer_types to full)",
    "s_aux": "its sinks belong to the attention that the model was trained with; leave the pattern out",
    "softcap": "torch's kernels do not cap scores; use a model without attn_logit_softcapping",
    "position_bias": "a bias on scores is not supported; use a model with rotary or learned positions",
    "head_mask": "heads cannot be masked; leave head_mask out",
    "output_attentions": "the attention weights are never formed; leave output_attentions out",
    "cache": "continuous batching is not supported; call generate",
}
PACKED_IN_COMPILED_CODE = (
    "position_ids start anew inside a row, and compiled code cannot see where: pass the borders of documents "
    "as cu_seq_lens_q, as DataCollatorWithFlattening(return_flash_attn_kwargs=True) does."
)
PADDED_IN_COMPILED_CODE = (
    "attention_mask has holes, or position_ids do not increase by 1: a padded batch holds one document per row, with "
    "padding on the left or on the right. Uncompiled code says where."
)


def attend(
    module: nn.Module,
    query_BHMD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    parallel: ContextParallel | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer: out (B, M, H, D), and None in the place of attention weights.

    Args:
        attention_mask: the mask that `make_mask` returned.
        position_ids: shape (1, M) or (B, M). A packed document begins wherever the positions do not increase by 1.
        cu_seq_lens_q: the borders of packed documents, used instead of position_ids. Under `parallel` these are the
            borders in the whole sequence.
        parallel: the ranks that share the sequence. The rows are then this rank's shard.
        sliding_window, s_aux: the layer's window and learned sinks (H,). They are allowed only if the config has no
            pattern. (The model then keeps its own attention.)

    Raises:
        ValueError: for a mask, a keyword or a shape that dilated attention does not take.
    """
    try:
        is_own = is_as_trained(module.config)
        if not is_own:
            options |= {"sliding_window": sliding_window, "s_aux": s_aux}
        _refuse_options(module, query_BHMD, value_BGSD, dropout, options)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        pattern = layer_pattern(module.config, sliding_window, is_causal=bool(is_causal))
        num_heads = query_BHMD.shape[1]
        if not is_own:
            # Count the layer's heads by the config: under tensor parallelism this rank may have only some of the heads.
            # Which keys a head reads depends on the head's index among all heads of the layer.
            num_heads = getattr(module.config, "num_attention_heads", num_heads)
        heads = held_heads(module, query_BHMD.shape[1], num_heads) or range(num_heads)
        bounded: BoundedLayer | None = getattr(key_BGSD, MARK, None)
        if bounded is None:
            _check_mask(attention_mask, num_heads, query_BHMD, key_BGSD, parallel)
        elif position_ids is not None:
            is_valid = torch.ones_like(position_ids) if attention_mask is None else attention_mask
            _check_one_document(is_valid.bool(), position_ids)
        if cu_seq_lens_q is not None and (attention_mask is not None or bounded is not None):
            raise ValueError(
                "cu_seq_lens_q together with an attention_mask or a cache: packed documents cannot have padding or "
                "cached rows. Leave out attention_mask, and generate from one document per row."
            )
    except ValueError as error:
        if parallel is not None:
            # Tell the other ranks why this rank refuses the call, because they would otherwise wait for this rank.
            refuse(parallel.key, str(error))
        raise
    if bounded is not None:
        return bounded.attend(
            query_BHMD, key_BGSD, value_BGSD, attention_mask, heads, num_heads, scaling
        ), None
    if attention_mask is not None and attention_mask.dim() == 3:
        bias_BHMS = attention_mask.unflatten(0, (-1, num_heads))[:, heads.start : heads.stop]
        return _attend_cached(query_BHMD, key_BGSD, value_BGSD, bias_BHMS, scaling), None
    # Cut keys and values to the number of queries, because in a static cache later rows are not written yet.
    num_rows = query_BHMD.shape[2]
    rows_BMHD = [x[:, :, :num_rows].transpose(1, 2) for x in (query_BHMD, key_BGSD, value_BGSD)]
    dilated: Any = partial(
        dilated_attention,
        pattern=pattern,
        parallel=parallel,
        scale=scaling,
        sinks=s_aux,
        heads_held=heads,
        num_heads=num_heads,
    )
    with called_by(parallel, getattr(module, "layer_idx", None)):
        if attention_mask is not None:
            return _attend_padded(dilated, rows_BMHD, attention_mask, position_ids), None
        if cu_seq_lens_q is None and parallel is None and position_ids is not None:
            cu_seqlens = find_borders(position_ids, len(query_BHMD), num_rows)
            if cu_seqlens is not None:
                rows_1THD = [x.flatten(0, 1)[None] for x in rows_BMHD]
                return dilated(*rows_1THD, cu_seqlens=cu_seqlens).view(rows_BMHD[0].shape), None
        return dilated(*rows_BMHD, cu_seqlens=cu_seq_lens_q), None


def _attend_cached(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float | None
) -> Tensor:
    """Attention of new queries to all rows of a cache: softmax(scores + bias) @ value, as (B, M, H, D).

    bias: the float mask that `make_mask` returned.
    """
    bias = bias.to(query.dtype)
    is_grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scaling, enable_gqa=is_grouped
    )
    # Set the output of a query that no branch covers to 0, because torch's kernel may return NaN for such a query.
    is_uncovered = (bias == -torch.inf).all(-1, keepdim=True)
    return out.masked_fill(is_uncovered, 0).transpose(1, 2)


def _attend_padded(
    dilated: Any, rows_BMHD: Sequence[Tensor], valid_BM: Tensor, position_ids: Tensor | None
) -> Tensor:
    """Attention over a batch with padding. Returns out (B, M, H, D), which is 0 at padding.

    The batch entries are packed into one sequence, without padding. Each entry becomes a document of this sequence.
    """
    if not torch.compiler.is_compiling() and valid_BM.all():
        return dilated(*rows_BMHD)
    _check_one_run(valid_BM)
    _check_one_document(valid_BM, position_ids)
    valid_T = valid_BM.flatten().nonzero().squeeze(1)
    lengths_B = valid_BM.sum(1)
    cu_seqlens = F.pad(lengths_B[lengths_B > 0].cumsum(0), (1, 0)).to(torch.int32)
    rows_1THD = [x.flatten(0, 1)[valid_T][None] for x in rows_BMHD]
    out_1THD = dilated(*rows_1THD, cu_seqlens=cu_seqlens if len(valid_T) else None)
    out = out_1THD.new_zeros(valid_BM.numel(), *out_1THD.shape[2:])
    return out.index_copy(0, valid_T, out_1THD[0]).unflatten(0, valid_BM.shape)


def _check_one_document(valid_BM: Tensor, position_ids: Tensor | None) -> None:
    """Raise ValueError if position_ids do not increase by 1 in some batch entry. They may begin with any number."""
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] == 1:
        return
    resets = (position_ids.diff() != 1) & valid_BM[:, 1:] & valid_BM[:, :-1]
    if torch.compiler.is_compiling():
        torch._assert_async(~resets.any(), PADDED_IN_COMPILED_CODE)
    elif resets.any():
        row, place = resets.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids do not increase by 1 at position {place + 1} of row {row}: a batch with padding "
            "(attention_mask) or a BoundedCache holds one document per row. Pack documents without them."
        )


def find_borders(position_ids: Tensor, batch: int, num_rows: int) -> Tensor | None:
    """The borders of packed documents in the flattened batch of B * M rows, int32.

    A document begins wherever position_ids do not increase by 1. The result is None if they always increase by 1.
    """
    if position_ids.dim() != 2 or position_ids.shape[1] != num_rows:
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} for {num_rows} rows: pass the shape (1 or batch, "
            "rows). Dilated attention finds the starts of packed documents in position_ids."
        )
    resets = position_ids.diff() != 1
    if torch.compiler.is_compiling():
        # Assert that there is one document, because a graph cannot branch on data.
        torch._assert_async(~resets.any(), PACKED_IN_COMPILED_CODE)
        return None
    if not resets.any():
        return None
    starts = F.pad(resets, (1, 0), value=True).expand(batch, -1).flatten().nonzero().squeeze(1)
    return F.pad(starts, (0, 1), value=batch * num_rows).to(torch.int32)


def _refuse_options(
    module: nn.Module, query: Tensor, value: Tensor, dropout: float, options: dict[str, Any]
) -> None:
    name = type(module).__name__
    for option, why in REFUSED.items():
        passed = options.get(option)
        if passed is not None and passed is not False:
            raise ValueError(f"{name} passes {option} to dilated attention: {why}.")
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{name} has value heads of width {value.shape[-1]} beside query heads of width {query.shape[-1]}, and "
            "dilated attention takes one width. Use another attn_implementation for this model."
        )
    if dropout:
        raise ValueError(
            f"{name} passes dropout={dropout} to dilated attention, which has none. Set the config's attention dropout "
            "to 0 when the model is made or loaded (attention_dropout, attn_pdrop or attention_probs_dropout_prob=0.0)."
        )


def _check_mask(
    mask: Tensor | None, num_heads: int, query: Tensor, key: Tensor, parallel: object
) -> None:
    batch, _, num_rows, _ = query.shape
    num_keys = key.shape[2]
    if mask is None:
        if num_keys != num_rows:
            raise ValueError(
                f"{num_rows} queries and {num_keys} keys without a mask: dilated attention is self-attention. It takes "
                "the rows of a cache only with a mask of transformers' mask interface, which this model does not use."
            )
        return
    if parallel is not None:
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} and parallel: a padded batch cannot be sharded. Pack the "
            "documents into one row, with cu_seq_lens_q."
        )
    is_padding = mask.dtype == torch.bool and mask.shape == (batch, num_rows)
    bias_shapes = [(size * num_heads, num_rows, num_keys) for size in (1, batch)]
    is_bias = mask.is_floating_point() and mask.shape in bias_shapes
    if not is_padding and not is_bias:
        remedy = f"Pass a 2-D mask of padding, ({batch}, {num_rows}), or none."
        if mask.dtype == torch.uint8:
            remedy = "A BoundedCache works only if the model leaves its keys unchanged: use a DynamicCache."
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} and {mask.dtype}: "
            f"the pattern decides which keys a query attends to. {remedy}"
        )


def _check_one_run(valid_BM: Tensor) -> None:
    """Raise ValueError if a batch entry has padding between its tokens. Padding on either side is allowed."""
    starts = F.pad(valid_BM, (1, 0))[:, :-1].logical_not() & valid_BM
    if torch.compiler.is_compiling():
        torch._assert_async((starts.sum(1) <= 1).all(), PADDED_IN_COMPILED_CODE)
        return
    rows_with_holes = (starts.sum(1) > 1).nonzero()
    if len(rows_with_holes):
        row = int(rows_with_holes[0])
        places = starts[row].nonzero().flatten().tolist()
        raise ValueError(
            f"attention_mask row {row} has holes: valid rows begin at positions {places}. A hole moves all later rows "
            "to other segments; put the padding on the left or on the right, or leave the rows out."
        )


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    config: Any,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """The mask that `attend` takes, made once for all layers. Its shape and dtype tell `attend` what a cache holds.

    None           There is no padding, and no cache holds earlier rows.
    (B, M) bool    True at tokens, False at padding. No cache holds earlier rows. (A static cache has more than M rows,
                   but the rows beyond M are not written yet.)
    (B, M) uint8   1 at tokens, 0 at padding. A BoundedCache holds earlier rows.
    (H, M, S) or   A float mask that is added to the scores. A cache that is no BoundedCache holds earlier rows. An
    (B * H, M, S)  entry is log(n), where n is the number of branches of the pattern in which the query attends to the
                   key: -inf for no branch, 0 for one branch, log 2 for two. The layout is that of torch's
                   attention masks of three dims.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        # Return a mask that an earlier call of this function made: with a static cache, `generate` makes the mask, and
        # the model's forward then passes this mask as `attention_mask`.
        return attention_mask
    is_bounded = (
        kv_length == q_length and not isinstance(q_offset, Tensor) and kv_offset == q_offset > 0
    )
    is_own = is_as_trained(config)
    refused_size = None if is_own else local_size
    _refuse_rules(mask_function, 0 if is_bounded else kv_offset, refused_size, use_vmap)
    if mask_function is bidirectional_mask_function and kv_length != q_length:
        raise ValueError(
            f"{q_length} queries attend to {kv_length} keys without a causal mask: dilated attention is "
            "self-attention, with as many keys as queries; cross-attention and encoders with a cache are not supported."
        )
    if not is_own:
        # Raise the ValueError of `pattern_of` if the config has no pattern. The pattern itself is not needed here.
        pattern_of(config, is_causal=True)
    elif kv_length != q_length:
        raise ValueError(
            f"{q_length} queries and {kv_length} keys: context_parallel computes whole sequences, without a "
            "cache. remove() the handle that it returned, then generate."
        )
    if is_bounded:
        if attention_mask is None:
            return torch.ones(batch_size, q_length, dtype=torch.uint8, device=device)
        _check_one_run(attention_mask)
        return attention_mask[:, kv_offset : kv_offset + q_length].to(torch.uint8)
    is_compiling = torch.compiler.is_compiling()
    if kv_length == q_length or (not is_compiling and int(q_offset) == 0):
        is_static = kv_length > q_length
        if attention_mask is None:
            return (
                torch.ones(batch_size, q_length, dtype=torch.bool, device=device)
                if is_static
                else None
            )
        valid_BM = attention_mask[:, :q_length]
        if not is_static and not is_compiling and valid_BM.all():
            return None
        return valid_BM
    rows_1S = torch.arange(kv_length, device=device).unsqueeze(0)
    first_B1 = torch.zeros_like(rows_1S[:, :1])
    valid_BS = torch.ones_like(rows_1S, dtype=torch.bool)
    if attention_mask is not None:
        valid_BS = F.pad(attention_mask, (0, kv_length - attention_mask.shape[1]))
        _check_one_run(valid_BS)
        first_B1 = valid_BS.int().argmax(1, keepdim=True)
    query_BM = q_offset + torch.arange(q_length, device=device) - first_B1
    key_BS = rows_1S - first_B1
    pattern = pattern_of(config, is_causal=True)
    counts = _counts(pattern, config.num_attention_heads, query_BM, key_BS, valid_BS)
    return counts.to(torch.promote_types(dtype, torch.float32)).log()


def _counts(
    pattern: DilatedPattern, num_heads: int, query_BM: Tensor, key_BS: Tensor, valid_BS: Tensor
) -> Tensor:
    """In how many branches of the pattern a query attends to a key, (B * H, M, S) int16.

    query_BM and key_BS are positions within the document. valid_BS is False at padding.
    """
    query_BM1 = query_BM[:, :, None]
    key_B1S = key_BS[:, None]
    counts = torch.zeros(1, dtype=torch.int16, device=query_BM.device)
    for i, branch in enumerate(pattern.branches):
        length, rate = branch.segment_length, branch.dilation_rate
        phases = [pattern.phase_of(i, head, num_heads) for head in range(num_heads)]
        # A head that does not run this branch gets phase -1. No position has this phase, so the head reads no key.
        phases_H1 = torch.tensor([-1 if s is None else s for s in phases], device=query_BM.device)[
            :, None
        ]
        reads_BHM = query_BM[:, None] % length % rate == phases_H1
        reads_BHS = key_B1S % length % rate == phases_H1
        seen_BMS = branch.in_reach(query_BM1, key_B1S, is_causal=True) & valid_BS[:, None]
        counts = counts + (seen_BMS[:, None] & reads_BHM[..., None] & reads_BHS[:, :, None])
    return counts.flatten(0, 1)


def _refuse_rules(
    mask_function: Any, kv_offset: int, local_size: int | None, use_vmap: bool
) -> None:
    """Raise ValueError for a mask that is neither causal nor bidirectional, and for a cache that dropped rows.

    Masks of packed documents are allowed too: `attend` finds the documents by position_ids.
    """
    if local_size is not None:
        raise ValueError(
            f"a layer has a sliding window, or chunks, of {local_size} rows. This is another pattern, and the layer's "
            "cache drops rows that dilated attention needs. Set config.sliding_window=None (and layer_types to full)."
        )
    if use_vmap or "or_mask" in getattr(mask_function, "__name__", ""):
        raise ValueError(
            "the model masks by rules of its own (image tokens, blocks), but the pattern decides which keys a "
            "query attends to. Use another attn_implementation for this model."
        )
    if kv_offset:
        raise ValueError(
            f"the cache dropped {kv_offset} rows: use a DynamicCache or StaticCache without a window."
        )

"""Modules built on `dilated_attention`.

Shape suffixes: B batch, N positions (the local ones under `parallel`), E embedding, H query heads, G key/value heads,
D head dim, T positions that are not padding.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import dilated_attention, validate_cu_seqlens
from .pattern import DilatedPattern
from .ranks.context import ContextParallel, context_named, refuse
from .run.cache import DilatedCache

DEFAULT_ROTARY_BASE = 10_000.0


class MultiheadDilatedAttention(nn.Module):
    """Self-attention with a dilated pattern: `nn.MultiheadAttention(batch_first=True)` where the meanings agree.

        out = out_proj(subln(dilated_attention(rotate(query Wq), rotate(key Wk), value Wv)))

    `rotate` is there with `rotary`, `subln` (a LayerNorm before the output projection, as in MAGNETO) with
    `sub_layernorm`. Parameters have the names and shapes of torch's module, so its `state_dict` loads as it is. With
    `num_kv_heads=G`, in_proj_weight_(E+2GD)E holds the rows of Wq, then of Wk, then of Wv.

    pattern:       who attends whom; causality is part of it.
    num_kv_heads:  grouped queries; num_heads must be a multiple of it. None means num_heads.
    rotary:        rotary position embeddings (rotate-half form); True for base 10,000 or the base itself.
    parallel:      inputs and outputs are then the local shards of sequences that the ranks hold together.

    What torch's module can do and this one cannot (dropout, attention masks, attention weights, cross-attention, extra
    key/value rows) is refused with a ValueError.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: DilatedPattern,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        batch_first: bool = True,
        sub_layernorm: bool = False,
        rotary: bool | float = False,
        parallel: ContextParallel | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(embed_dim, num_heads, num_kv_heads)
        if dropout != 0.0:
            raise ValueError(f"dropout={dropout}: attention dropout is not supported; pass dropout=0.0")
        if not batch_first:
            raise ValueError("batch_first=False: inputs are (batch, positions, embed_dim); pass batch_first=True")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.pattern = pattern
        self.parallel = parallel
        self.rotary_base = _rotary_base(rotary, self.head_dim)
        # nn.TransformerEncoderLayer reads these two: around another attention it must not take its fast path.
        self.batch_first = True
        self._qkv_same_embed_dim = False

        kv_dim = num_kv_heads * self.head_dim
        self._split_sizes = (embed_dim, kv_dim, kv_dim)
        self.in_proj_weight = nn.Parameter(torch.empty(sum(self._split_sizes), embed_dim, device=device, dtype=dtype))
        if bias:
            self.in_proj_bias = nn.Parameter(torch.empty(sum(self._split_sizes), device=device, dtype=dtype))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.sub_layernorm = nn.LayerNorm(embed_dim, device=device, dtype=dtype) if sub_layernorm else None
        self.reset_parameters()

    def reset_parameters(self, *, gain: float = 1.0) -> None:
        """Xavier per projection; `gain` scales the value and output projections only (MAGNETO, arXiv 2210.06423)."""
        for weight, weight_gain in zip(
            [*self.in_proj_weight.split(self._split_sizes), self.out_proj.weight], (1.0, 1.0, gain, gain), strict=True
        ):
            nn.init.xavier_normal_(weight, gain=weight_gain)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.sub_layernorm is not None:
            self.sub_layernorm.reset_parameters()

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"embed_dim={self.embed_dim}, {heads}, rotary_base={self.rotary_base}, pattern={self.pattern}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        *,
        is_causal: bool | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: DilatedCache | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """(B, N, E) three times -> (B, N, E) and None, in the place of torch's attention weights.

        key_padding_mask: bool (B, N), True at padding, which must follow the valid positions of each row. Each row
                     becomes a document of its own length; padded positions come out as zeros before `out_proj`.
        is_causal:   None takes the pattern's; anything else must agree with it.
        positions:   integer (N,), the place of each row for `rotary`. None means 0, 1, ... within each document,
                     counted over all ranks under `parallel`, and from `cache.position` on with a cache.
        cu_seqlens:  as for `dilated_attention`: packed documents, batch 1.
        cache:       of this layer alone (`make_cache`): the N rows are appended to the sequences in it.
        lengths:     with a cache, (B,): how many of its N rows each batch entry appends. What comes out of the rest,
                     which is padding, means nothing.
        """
        try:
            self._check_inputs(query, key, value)
            self._check_unsupported(need_weights, attn_mask, is_causal)
            self._check_mask(key_padding_mask, cu_seqlens)
            self._check_positions(positions, query)
            self._check_cache(cache, lengths, key_padding_mask, positions)
            if cu_seqlens is not None:
                validate_cu_seqlens(cu_seqlens, query.shape[0])
        except ValueError as error:
            if self.parallel is not None:  # or the other ranks would wait for this one
                refuse(self.parallel.key, str(error))
            raise
        if key_padding_mask is not None:
            return self._forward_padded(query, key, value, key_padding_mask, positions), None
        if self.rotary_base is not None and positions is None:
            positions = self._positions(query, cu_seqlens, cache)
        return self.out_proj(self._attend(query, key, value, positions, cu_seqlens, cache, lengths)), None

    def make_cache(self, batch: int, *, max_len: int | None = None, keep: int = 0) -> DilatedCache:
        """A cache for this layer, of its device and dtype. The arguments are those of `DilatedCache`."""
        weight = self.in_proj_weight
        sizes = (batch, self.num_heads, self.num_kv_heads, self.head_dim)
        return DilatedCache(self.pattern, *sizes, dtype=weight.dtype, device=weight.device, max_len=max_len, keep=keep)

    def _attend(
        self,
        query_BNE: Tensor,
        key_BNE: Tensor,
        value_BNE: Tensor,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: DilatedCache | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Everything before the output projection."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self._project(query_BNE, key_BNE, value_BNE))
        if self.rotary_base is not None:
            assert positions is not None
            table = rotary_table(positions.to(q.device), self.head_dim, self.rotary_base)
            cos_ND, sin_ND = (x.to(torch.promote_types(q.dtype, torch.float32)) for x in table)
            q, k = rotate(q, cos_ND, sin_ND), rotate(k, cos_ND, sin_ND)
        out_BNHD = dilated_attention(
            q, k, v, self.pattern, parallel=self.parallel, cu_seqlens=cu_seqlens, cache=cache, lengths=lengths
        )
        assert isinstance(out_BNHD, Tensor)
        out_BNE = out_BNHD.flatten(2)
        return out_BNE if self.sub_layernorm is None else self.sub_layernorm(out_BNE)

    def _project(self, query_BNE: Tensor, key_BNE: Tensor, value_BNE: Tensor) -> tuple[Tensor, ...]:
        if query_BNE is key_BNE and key_BNE is value_BNE:
            return F.linear(query_BNE, self.in_proj_weight, self.in_proj_bias).split(self._split_sizes, dim=-1)
        weights = self.in_proj_weight.split(self._split_sizes)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(self._split_sizes)
        inputs = (query_BNE, key_BNE, value_BNE)
        return tuple(F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True))

    def _forward_padded(
        self, query_BNE: Tensor, key_BNE: Tensor, value_BNE: Tensor, mask_BN: Tensor, positions: Tensor | None
    ) -> Tensor:
        batch, num_positions, _ = query_BNE.shape
        lengths_B = valid_lengths(mask_BN, batch, num_positions)
        valid_BN = torch.arange(num_positions, device=lengths_B.device) < lengths_B[:, None]
        rows_T = valid_BN.flatten().nonzero().squeeze(1).to(query_BNE.device)
        borders = F.pad(lengths_B[lengths_B > 0].cumsum(0), (1, 0)).to(torch.int32)
        if positions is None:
            positions = torch.arange(num_positions, device=query_BNE.device)

        def packed(x_BNE: Tensor) -> Tensor:
            return x_BNE.flatten(0, 1)[rows_T].unsqueeze(0)

        packed_query = packed(query_BNE)
        packed_key = packed_query if key_BNE is query_BNE else packed(key_BNE)
        packed_value = packed_key if value_BNE is key_BNE else packed(value_BNE)
        cu_seqlens = borders if len(rows_T) else None  # without a valid position there is no document
        out_1TE = self._attend(packed_query, packed_key, packed_value, positions[rows_T % num_positions], cu_seqlens)
        out_flat = out_1TE.new_zeros(batch * num_positions, self.embed_dim).index_copy(0, rows_T, out_1TE[0])
        return self.out_proj(out_flat.unflatten(0, (batch, num_positions)))

    def _positions(self, query_BNE: Tensor, cu_seqlens: Tensor | None, cache: DilatedCache | None = None) -> Tensor:
        if cache is not None:
            return cache.position[:, None] + torch.arange(query_BNE.shape[1], device=cache.device)
        if self.parallel is not None:
            return _positions_on_ranks(query_BNE, cu_seqlens, self.parallel.key)
        return document_positions(query_BNE.shape[1], cu_seqlens, query_BNE.device)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 3 or x.shape[-1] != self.embed_dim:
                remedy = "; add a batch dim with unsqueeze(0)" if x.dim() == 2 else ""
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}, not (batch, positions, embed_dim={self.embed_dim}){remedy}"
                )
        if not query.shape == key.shape == value.shape:
            raise ValueError(
                f"query, key and value have shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}: "
                "dilated attention is self-attention, the three must have the same batch and positions"
            )

    def _check_unsupported(self, need_weights: bool, attn_mask: Tensor | None, is_causal: bool | None) -> None:
        if need_weights:
            raise ValueError("need_weights=True: the attention weights are never formed; pass need_weights=False")
        if attn_mask is not None:
            raise ValueError(
                f"attn_mask of shape {tuple(attn_mask.shape)}: who attends whom is the pattern's to say; pass "
                "attn_mask=None, with is_causal=True in the pattern for a causal mask"
            )
        if is_causal is not None and is_causal != self.pattern.is_causal:
            raise ValueError(
                f"is_causal={is_causal}, but the pattern has is_causal={self.pattern.is_causal}: leave the argument "
                "out, or make the pattern causal as wanted"
            )

    def _check_positions(self, positions: Tensor | None, query: Tensor) -> None:
        if positions is None:
            return
        if self.rotary_base is None:
            raise ValueError("positions were passed, but only rotary embeddings read them: construct with rotary=True")
        if positions.shape != query.shape[1:2]:
            raise ValueError(
                f"positions have shape {tuple(positions.shape)}, the inputs need ({query.shape[1]},), one for each "
                "row of this rank: ContextParallel.positions(N, cu_seqlens) tells them"
            )

    def _check_cache(
        self, cache: DilatedCache | None, lengths: Tensor | None, mask: Tensor | None, positions: Tensor | None
    ) -> None:
        if cache is None and lengths is None:
            return
        if mask is not None:
            raise ValueError(
                "key_padding_mask and cache: say with lengths, (B,) integers, how many rows of each entry are valid"
            )
        if positions is not None:
            raise ValueError("positions and cache: rows are appended at cache.position; leave positions out")
        if cache is not None and self.parallel is not None:
            raise ValueError(
                "cache and parallel: a cache is of one device; use a module with parallel=None and the same "
                "parameters, and DilatedCache.gather for what ranks have prefilled"
            )

    def _check_mask(self, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        if key_padding_mask is None:
            return
        if self.parallel is not None:
            raise ValueError(
                "key_padding_mask and parallel: a padded batch cannot be sharded; pack the documents into one row and "
                "pass cu_seqlens"
            )
        if cu_seqlens is not None:
            raise ValueError("key_padding_mask and cu_seqlens both describe the documents: pass one of them")


def valid_lengths(key_padding_mask_BN: Tensor, batch: int, num_positions: int) -> Tensor:
    """(B, N), True at padding -> (B,) lengths. In each row the padding must follow the valid positions."""
    mask_BN = key_padding_mask_BN
    if mask_BN.shape != (batch, num_positions):
        raise ValueError(
            f"key_padding_mask has shape {tuple(mask_BN.shape)}, the inputs need ({batch}, {num_positions})"
        )
    if mask_BN.is_floating_point():
        # nn.TransformerEncoderLayer turns its bool mask into 0 and -inf before it calls the attention.
        if not ((mask_BN == 0) | (mask_BN == -math.inf)).all():
            raise ValueError("key_padding_mask is a float mask with values other than 0 and -inf: pass a bool mask")
        mask_BN = mask_BN != 0
    if mask_BN.dtype != torch.bool:
        raise ValueError(f"key_padding_mask has dtype {mask_BN.dtype}: pass a bool mask, True at padding")
    lengths_B = (~mask_BN).sum(1)
    expected_BN = torch.arange(num_positions, device=mask_BN.device) >= lengths_B[:, None]
    wrong = (mask_BN != expected_BN).nonzero()
    if len(wrong):
        row, first = wrong[0].tolist()
        raise ValueError(
            f"key_padding_mask row {row} has padding at position {first} and valid positions after it "
            f"({int(lengths_B[row])} valid in all): padding must be on the right; move it there, or pack the documents "
            "into one row and pass cu_seqlens"
        )
    return lengths_B


@torch.library.custom_op("ring_dilated_attention::positions", mutates_args=())
def _positions_on_ranks(x: Tensor, cu_seqlens: Tensor | None, parallel: str) -> Tensor:
    """Positions within their document of this rank's rows, (N,) int64 on the CPU. An op, to be compiled as one: ranks
    tell each other how many rows they have."""
    context = context_named(parallel)
    assert context is not None
    given = None if cu_seqlens is None else cu_seqlens.tolist()
    fields: dict[str, object] = {"call": "positions of MultiheadDilatedAttention", "cu_seqlens": given}
    return context.local_positions(context.handshake(x.shape[1], fields), cu_seqlens)


@_positions_on_ranks.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape[1], dtype=torch.int64, device="cpu")


def document_positions(num_positions: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """0, 1, ... within each packed document, (N,) int64, of a sequence that one device holds."""
    positions_N = torch.arange(num_positions, device=device)
    if cu_seqlens is None:
        return positions_N
    starts = cu_seqlens.to(device, torch.int64)
    return positions_N - starts[torch.searchsorted(starts, positions_N, right=True) - 1]


def rotary_table(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each (..., N, D/2) float64, of position * base^(-2i/D), of positions (..., N).

    Why float64: at position 10^6 a float32 angle is off by 0.06, and beyond 2^24 neighbours get the same one.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles_ND = positions.to(torch.float64)[..., None] * base**-exponents
    return angles_ND.cos(), angles_ND.sin()


def rotate(x_BNHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + D/2]) by the angle of their row, in the table's dtype; returned in x's dtype.

    The table is one for all batch entries, (N, D/2), or one for each, (B, N, D/2).
    """
    first, second = x_BNHD.to(cos_ND.dtype).chunk(2, dim=-1)
    cos, sin = cos_ND.unsqueeze(-2), sin_ND.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BNHD.dtype)


def _check_heads(embed_dim: int, num_heads: int, num_kv_heads: int) -> None:
    if num_heads < 1 or embed_dim < 1:
        raise ValueError(f"embed_dim={embed_dim} and num_heads={num_heads} must be at least 1")
    if embed_dim % num_heads:
        raise ValueError(
            f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads} (remainder {embed_dim % num_heads}): "
            "choose a number of heads that divides it"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}: every key/value head serves "
            "num_heads / num_kv_heads query heads"
        )


def _rotary_base(rotary: bool | float, head_dim: int) -> float | None:
    if rotary is False:
        return None
    if head_dim % 2:
        raise ValueError(f"rotary with head_dim={head_dim}: rotary embeddings rotate pairs, the head dim must be even")
    base = DEFAULT_ROTARY_BASE if rotary is True else float(rotary)
    if not base > 1.0:
        raise ValueError(f"rotary={rotary}: the base must be greater than 1; True means {DEFAULT_ROTARY_BASE:,.0f}")
    return base

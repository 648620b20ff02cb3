"""MultiheadDilatedAttention: dilated attention as a module, with its projections.

Shape suffixes: B batch, N positions (the local ones under `parallel`), E embedding, H query heads, G key/value heads,
D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import dilated_attention
from ..attention.validate import (
    autocast,
    check_heads,
    check_objects,
    check_tensor,
    refuse_others,
)
from ..pattern import DilatedPattern
from ..plan.sharded_call import held_heads
from ..ranks.call import validate_cu_seqlens
from ..ranks.context import ContextParallel
from ..ranks.handshake import RefusedError
from ..ranks.named import called_by, refuse
from ..ranks.ranks import warn_of_forgotten_parallel
from ..run.dilated_cache import DilatedCache
from ..run.views import on_device
from .numbered import NumberedModule
from .padded import packed_rows
from .rotary import (
    RotaryTable,
    check_positions,
    document_positions,
    positions_on_ranks,
    rotary_base,
    rotary_table,
    rotate,
)
from .trained_with import RemembersPattern, check_before_loading

Heads = tuple[Tensor, Tensor, Tensor]  # query (B, N, H, D), key and value (B, N, G, D)


class MultiheadDilatedAttention(NumberedModule, RemembersPattern):
    """Self-attention with a dilated pattern, called like `nn.MultiheadAttention(batch_first=True)`.

        out = out_proj(subln(dilated_attention(rotate(query Wq), rotate(key Wk), value Wv)))

    `rotate` is there only with `rotary`, and `subln` (a LayerNorm, as in MAGNETO) only with `sub_layernorm`. Parameters
    have the names and shapes of torch's module, so a `state_dict` of torch's module loads unchanged. Wq, Wk and Wv are
    stacked in in_proj_weight (E + 2GD, E).

    Args:
        pattern: which keys each query attends to, causal or not.
        num_kv_heads: G, for grouped-query attention. num_heads must be a multiple of G. None means num_heads.
        rotary: rotary position embeddings (rotate-half form). True means base 10,000; a number is the base.
        parallel: the ranks that share sequences. With `parallel`, inputs and outputs are shards. Compute the loss with
            `parallel.mean_loss`: if each rank averages the loss over its own shard, some positions count too much in
            the total loss, and no error says so.
        backend: as for `dilated_attention`.
        heads_held: which of the num_heads query heads this module holds (tensor parallelism), such as range(3, 6).
            `held` makes such modules. If several modules together hold all heads, their outputs add up to the output of
            the whole layer. Only the module that holds head 0 adds out_proj's bias.

    The module can replace the attention of nn.TransformerEncoderLayer (`layer.self_attn = module`), also within
    nn.TransformerEncoder. Dropout, attention masks, attention weights, cross-attention and extra key/value rows are not
    supported, and raise an error.
    """

    in_proj_bias: nn.Parameter | None

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
        backend: str = "auto",
        heads_held: range | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(embed_dim, num_heads, num_kv_heads)
        check_objects(pattern, parallel, backend)
        pattern.check_heads(num_heads, num_kv_heads)
        if dropout != 0.0:
            raise ValueError(
                f"dropout={dropout!r}: attention dropout is not supported; pass dropout=0.0"
            )
        if batch_first is not True:
            raise ValueError(
                f"batch_first={batch_first!r}: inputs are (batch, positions, embed_dim); pass True"
            )
        for name, switch in (("bias", bias), ("sub_layernorm", sub_layernorm)):
            if not isinstance(switch, bool):
                raise ValueError(f"{name} must be True or False, got {switch!r}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.pattern = pattern
        self.backend = backend
        self.rotary_base = rotary_base(rotary, self.head_dim)
        self.heads_held = range(num_heads) if heads_held is None else heads_held
        num_held = len(self.heads_held) if isinstance(heads_held, range) else num_heads
        ratio = num_heads // num_kv_heads
        # Raise ValueError if `heads_held` does not fit the layer.
        held_heads(num_held, ratio, self.heads_held, num_heads)
        if sub_layernorm and num_held < num_heads:
            raise ValueError(
                f"sub_layernorm=True takes its mean over all {num_heads} heads, but heads_held={heads_held} has only "
                f"{num_held} heads: leave out sub_layernorm or heads_held"
            )
        # Set the two attributes that nn.TransformerEncoderLayer reads. `_qkv_same_embed_dim` = False switches off the
        # fast path of nn.TransformerEncoderLayer, which would bypass `forward`.
        self.batch_first = True
        self._qkv_same_embed_dim = False

        held_dim = num_held * self.head_dim
        kv_dim = num_held // ratio * self.head_dim
        self._split_sizes = (held_dim, kv_dim, kv_dim)
        num_rows = sum(self._split_sizes)
        self.in_proj_weight = nn.Parameter(
            torch.empty(num_rows, embed_dim, device=device, dtype=dtype)
        )
        in_proj_bias = (
            nn.Parameter(torch.empty(num_rows, device=device, dtype=dtype)) if bias else None
        )
        self.register_parameter("in_proj_bias", in_proj_bias)
        has_bias = bias and self.heads_held.start == 0
        self.out_proj = nn.Linear(held_dim, embed_dim, bias=has_bias, device=device, dtype=dtype)
        self.sub_layernorm = (
            nn.LayerNorm(embed_dim, device=device, dtype=dtype) if sub_layernorm else None
        )
        self.share(parallel)
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(check_before_loading)

    def reset_parameters(self, *, gain: float = 1.0) -> None:
        """Initialise each projection by Xavier's rule. `gain` scales only the weights of the value projection and the
        output projection (MAGNETO, arXiv 2210.06423)."""
        weights = [*self.in_proj_weight.split(self._split_sizes), self.out_proj.weight]
        for weight, weight_gain in zip(weights, (1.0, 1.0, gain, gain), strict=True):
            nn.init.xavier_normal_(weight, gain=weight_gain)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        if self.sub_layernorm is not None:
            self.sub_layernorm.reset_parameters()

    @torch.no_grad()
    def held(self, heads: range) -> "MultiheadDilatedAttention":
        """A module that holds some of this module's query heads, with copies of their parameters."""
        if len(self.heads_held) < self.num_heads:
            raise ValueError(
                f"this module has {self.heads_held} of {self.num_heads} heads: call `held` on a module with all heads"
            )
        weight = self.in_proj_weight
        module = MultiheadDilatedAttention(
            self.embed_dim,
            self.num_heads,
            self.pattern,
            num_kv_heads=self.num_kv_heads,
            bias=self.in_proj_bias is not None,
            sub_layernorm=self.sub_layernorm is not None,
            rotary=self.rotary_base or False,
            parallel=self.parallel,
            backend=self.backend,
            heads_held=heads,
            # Draw no random numbers, so that random generators stay in the same state on ranks with different heads.
            device="meta",
            dtype=weight.dtype,
        ).to_empty(device=weight.device)
        ratio = self.num_heads // self.num_kv_heads
        dim = self.head_dim
        columns = slice(heads.start * dim, heads.stop * dim)
        kv_columns = slice(heads.start // ratio * dim, heads.stop // ratio * dim)
        for name, own in module.named_parameters():
            whole: Tensor = self.get_parameter(name)
            own.requires_grad_(whole.requires_grad)
            if name.startswith("in_proj"):
                query, key, value = whole.split(self._split_sizes)
                whole = torch.cat([query[columns], key[kv_columns], value[kv_columns]])
            own.copy_(whole[:, columns] if name == "out_proj.weight" else whole)
        return module.train(self.training)

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        others = "" if self.backend == "auto" else f", backend={self.backend!r}"
        others += (
            "" if len(self.heads_held) == self.num_heads else f", heads_held={self.heads_held}"
        )
        return f"embed_dim={self.embed_dim}, {heads}, rotary_base={self.rotary_base}, pattern={self.pattern}{others}"

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
        positions: Tensor | RotaryTable | None = None,
        cu_seqlens: Tensor | None = None,
        cache: DilatedCache | None = None,
        lengths: Tensor | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        """The output (B, N, E) for query, key and value of shape (B, N, E), and None where torch's module returns
        attention weights.

        Args:
            key_padding_mask: bool (B, N), True at padding, which must follow the valid positions of each batch entry.
                Each entry becomes a document of its own length. Padded positions are zeros before `out_proj`.
            is_causal: the hint that torch passes. True raises an error unless the pattern is causal. False and None
                have no effect.
            positions: integer (N,), the positions by which `rotary` rotates the rows; or the `rotary_table` of these
                positions, which the layers of a model can share. None means 0, 1, ... within each document, counted
                over all ranks under `parallel`. With a cache, None means from `cache.position` on, and the only other
                value allowed is the `rotary_table` of `cache.next_positions(N)`.
            cu_seqlens: borders of packed documents, as for `dilated_attention`; the batch must be 1.
            cache: a cache that only this layer uses (`make_cache`). The call appends its N rows to it.
            lengths: with a cache, (B,) integers: each batch entry appends only this many of its N rows. The outputs of
                the rows after these have no meaning.
        """
        try:
            refuse_others(type(self).__name__, others)
            self._check_inputs(query, key, value)
            self._check_masks(need_weights, attn_mask, is_causal, key_padding_mask)
            self._check_documents(query, key_padding_mask, cu_seqlens, cache, lengths)
            check_positions(positions, query, self.head_dim, self.rotary_base, cache is not None)
            table = self._table(query, positions, cu_seqlens, cache)
            heads = None if key_padding_mask is not None else self._heads(query, key, value, table)
        except RefusedError:  # all ranks raise RefusedError, so no rank waits for this rank
            raise
        except Exception as error:
            # Tell the other ranks of the error, because they would otherwise wait for this rank.
            if self.parallel is not None:
                refuse(self.parallel.key, str(error) or type(error).__name__)
            raise
        if heads is None:
            assert key_padding_mask is not None
            if self.parallel is None:
                # Warn of a forgotten `parallel` here: `dilated_attention` does not warn if it gets cu_seqlens, which
                # `_forward_padded` passes.
                warn_of_forgotten_parallel(query.shape[1])
            return self._forward_padded(query, key, value, key_padding_mask, table), None
        return self.out_proj(self._attend(heads, cu_seqlens, cache, lengths)), None

    def make_cache(self, batch: int, *, max_len: int | None = None, keep: int = 0) -> DilatedCache:
        """A `DilatedCache` with the heads, device and dtype of this layer. Under autocast the dtype is autocast's."""
        weight = self.in_proj_weight
        return DilatedCache(
            self.pattern,
            batch,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            dtype=autocast(weight.new_empty(0)).dtype,
            device=weight.device,
            max_len=max_len,
            keep=keep,
            heads_held=self.heads_held,
        )

    def rotary_table(self, positions: Tensor) -> RotaryTable:
        """The rotary angles at these positions, as a table that `forward` takes as `positions`. Layers with the same
        head dim and base can share it.

        positions: integer (N,), the position of each of this rank's rows in its document, on the device of the inputs;
                   or (B, N), if batch entries are at different positions (`cache.next_positions(N)`).
        """
        if self.rotary_base is None:
            raise ValueError("this module has no rotary embeddings: construct it with rotary=True")
        dtype = torch.promote_types(self.in_proj_weight.dtype, torch.float32)
        return rotary_table(positions, self.head_dim, self.rotary_base, dtype)

    def _table(
        self,
        query_BNE: Tensor,
        positions: Tensor | RotaryTable | None,
        cu_seqlens: Tensor | None,
        cache: DilatedCache | None,
    ) -> RotaryTable | None:
        if self.rotary_base is None:
            return None
        if isinstance(positions, RotaryTable):
            return positions
        if positions is not None:
            places = positions
        elif cache is not None:
            places = cache.next_positions(query_BNE.shape[1])
        elif self.parallel is not None:
            places = positions_on_ranks(query_BNE, cu_seqlens, self.parallel.key)
        else:
            places = document_positions(query_BNE.shape[1], cu_seqlens, query_BNE.device)
        return self.rotary_table(on_device(places, query_BNE.device))

    def _heads(
        self, query_BNE: Tensor, key_BNE: Tensor, value_BNE: Tensor, table: RotaryTable | None
    ) -> Heads:
        """Project and rotate the inputs. Returns query (B, N, H, D), key and value (B, N, G, D). H and G count the
        heads that this module holds."""
        if query_BNE is key_BNE and key_BNE is value_BNE:
            projected = F.linear(query_BNE, self.in_proj_weight, self.in_proj_bias).split(
                self._split_sizes, dim=-1
            )
        else:
            weights = self.in_proj_weight.split(self._split_sizes)
            biases = (
                (None,) * 3
                if self.in_proj_bias is None
                else self.in_proj_bias.split(self._split_sizes)
            )
            projected = tuple(map(F.linear, (query_BNE, key_BNE, value_BNE), weights, biases))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        return (q, k, v) if table is None else (rotate(q, table), rotate(k, table), v)

    def _attend(
        self,
        heads: Heads,
        cu_seqlens: Tensor | None,
        cache: DilatedCache | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """The input (B, N, H D) of `out_proj`: the attention, followed by `sub_layernorm` if the layer has one."""
        with called_by(self.parallel, self._number):
            out_BNHD = dilated_attention(
                *heads,
                self.pattern,
                parallel=self.parallel,
                cu_seqlens=cu_seqlens,
                backend=self.backend,
                heads_held=self.heads_held,
                num_heads=self.num_heads,
                cache=cache,
                lengths=lengths,
            )
        assert isinstance(out_BNHD, Tensor)
        out_BNE = out_BNHD.flatten(2)
        return out_BNE if self.sub_layernorm is None else self.sub_layernorm(out_BNE)

    def _forward_padded(
        self,
        query_BNE: Tensor,
        key_BNE: Tensor,
        value_BNE: Tensor,
        mask_BN: Tensor,
        table: RotaryTable | None,
    ) -> Tensor:
        rows = packed_rows(mask_BN, query_BNE)
        if table is not None:
            table = rows.pack_table(table)
        # Pack a tensor only once if it is both query and key, or both key and value.
        packed_query = rows.pack(query_BNE)
        packed_key = packed_query if key_BNE is query_BNE else rows.pack(key_BNE)
        packed_value = packed_key if value_BNE is key_BNE else rows.pack(value_BNE)
        heads = self._heads(packed_query, packed_key, packed_value, table)
        return self.out_proj(rows.unpack(self._attend(heads, rows.cu_seqlens)))

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_tensor(name, x)
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

    def _check_masks(
        self,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool | None,
        key_padding_mask: Tensor | None,
    ) -> None:
        if need_weights:
            raise ValueError(
                "need_weights=True: the attention weights are never formed; pass need_weights=False. For some queries "
                "layers.attention_weights computes them; layers.influence says which positions mattered to an output"
            )
        if attn_mask is not None:
            raise ValueError(
                "attn_mask: the pattern decides which keys a query attends to; pass attn_mask=None, and for a causal "
                "mask a pattern with is_causal=True"
            )
        if is_causal and not self.pattern.is_causal:
            raise ValueError(
                "is_causal=True, but the pattern has is_causal=False: leave is_causal out, or change the pattern"
            )
        if key_padding_mask is None:
            return
        check_tensor("key_padding_mask", key_padding_mask)
        if self.parallel is not None:
            raise ValueError(
                "key_padding_mask and parallel: a padded batch cannot be sharded; pack it with cu_seqlens"
            )

    def _check_documents(
        self,
        query: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: DilatedCache | None,
        lengths: Tensor | None,
    ) -> None:
        """Raise ValueError if a mask comes with cu_seqlens, a cache or lengths, or if cu_seqlens has a wrong dtype or
        shape. `dilated_attention` checks all other arguments."""
        if cu_seqlens is not None and mask is not None:
            raise ValueError(
                "key_padding_mask and cu_seqlens both describe the documents: pass one of them"
            )
        if cu_seqlens is not None:
            validate_cu_seqlens(cu_seqlens, query.shape[0])
        if mask is not None and not (cache is None and lengths is None):
            raise ValueError(
                "key_padding_mask and cache: say with lengths, (B,) integers, how many rows are valid"
            )

"""torchscale's LongNetEncoder and LongNetDecoder, with torchscale's names of parameters, on `dilated_attention`.

Shape suffixes: B batch, N positions (the local ones under `parallel`), E embedding, H heads, D head dim, V vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention import dilated_attention
from ...attention.validate import check_objects
from ...pattern import DilatedPattern
from ...ranks.context import ContextParallel, called_by
from ..checked_loading import CheckedLoading
from ..documents import Documents, agree_on_documents, why_no_tokens, why_not_dense
from ..recompute import Checkpointing, check_checkpointing, run_layer
from .architecture import FIRST_LEARNED_POSITION, TorchscaleConfig
from .gate import torchscale_attention, zero_rows

# A function of (query, key, value, pattern). functools.partial hides its other tensors, or FSDP would cast them.
Attend = Callable[..., Tensor]

ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swish": F.silu}
# Without gradients the feed-forward computes about this many hidden numbers at a time.
FFN_SLICE_NUMBERS = 2**24
# The scale of the pair that decays fastest: (0 + 0.4 D) / (1.4 D).
LEAST_SCALE = 0.4 / 1.4


class XPos(nn.Module):
    """Rotary positions (arXiv 2212.10554): scores decay with the distance to an earlier key. Dims 2i, 2i+1 pair up."""

    scale: Tensor

    def __init__(self, head_dim: int, scale_base: float) -> None:
        super().__init__()
        self.scale_base = scale_base
        self.register_buffer("scale", (torch.arange(0, head_dim, 2) + 0.4 * head_dim) / (1.4 * head_dim))

    def check(self, documents: Documents, pattern: DilatedPattern, dtype: torch.dtype) -> None:
        """Raise ValueError, on all ranks, if scores or rows would be infinite in the dtype of queries and keys.

        Scores grow with the distance to a later key, and rows with the distance to the middle of their document.
        """
        most = int(self.scale_base * math.log(torch.finfo(dtype).max) / -math.log(LEAST_SCALE))
        middle = (documents.longest + 1) // 2
        apart = 0 if pattern.is_causal else min(documents.longest, max(pattern.segment_lengths))
        if max(middle, apart) > most:
            wider = {torch.float16: "bfloat16 or float32", torch.float64: "shorter documents"}.get(dtype, "float64")
            where = "from the middle of a document" if middle > apart else "between queries and keys"
            raise ValueError(
                f"distances of up to {max(middle, apart)} {where}, and XPOS with scale_base={self.scale_base:g} grows "
                f"beyond {dtype} after {most}: take {wider}"
            )

    def tables(self, documents: Documents) -> tuple[Tensor, Tensor, Tensor]:
        """cos, sin and growth of the documents' rows, each (N, 1, D/2), float64 on the CPU."""
        positions_N = documents.positions().to(torch.float64)
        # Growth is 1 at the middle of a document. Any other place would give the same scores.
        halves = [torch.full((len(s.positions),), (s.length + 1) // 2, device="cpu") for s in documents.spans]
        exponents_N = (positions_N - torch.cat([positions_N[:0], *halves])) / self.scale_base
        num_pairs = len(self.scale)
        frequencies = 10_000.0 ** (-torch.arange(num_pairs, dtype=torch.float64, device="cpu") / num_pairs)
        angles = (positions_N[:, None] * frequencies)[:, None]
        growth = self.scale.to("cpu", torch.float64) ** exponents_N[:, None]
        return angles.cos(), angles.sin(), growth[:, None]

    @staticmethod
    def rotate(x_BNHD: Tensor, cos: Tensor, sin: Tensor, growth: Tensor) -> Tensor:
        wide = torch.promote_types(x_BNHD.dtype, torch.float32)
        cos, sin = ((table * growth).to(x_BNHD.device, wide) for table in (cos, sin))
        even, odd = x_BNHD[..., ::2], x_BNHD[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x_BNHD.dtype)


class SelfAttention(nn.Module):
    """out_proj(subln(attention(q_proj x, k_proj x, v_proj x)))."""

    def __init__(self, config: TorchscaleConfig, pattern: DilatedPattern, parallel: ContextParallel | None) -> None:
        super().__init__()
        self.parallel = parallel
        self._number = None if parallel is None else parallel.ranks.number_module()
        width = config.embed_dim
        self.num_heads, self.pattern = config.num_heads, pattern
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.inner_attn_ln = nn.LayerNorm(width, eps=config.layernorm_eps) if config.sub_layernorm else None
        self.xpos = None if config.xpos_scale_base is None else XPos(config.head_dim, config.xpos_scale_base)

    def forward(self, x_BNE: Tensor, documents: Documents, attend: Attend) -> Tensor:
        q, k, v = (proj(x_BNE).unflatten(-1, (self.num_heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.xpos is not None:
            self.xpos.check(documents, self.pattern, q.dtype)
            cos, sin, growth = self.xpos.tables(documents)
            q, k = self.xpos.rotate(q, cos, sin, growth), self.xpos.rotate(k, cos, sin, 1 / growth)
        with called_by(self.parallel, self._number):
            out_BNE = attend(q, k, v, self.pattern).flatten(2)
        del q, k, v  # without gradients these are two thirds of what this layer holds
        return self.out_proj(out_BNE if self.inner_attn_ln is None else self.inner_attn_ln(out_BNE))


class TorchscaleFeedForward(nn.Module):
    """fc2(subln(activation(fc1 x)))."""

    def __init__(self, config: TorchscaleConfig) -> None:
        super().__init__()
        self.activation = ACTIVATION[config.activation]
        self.fc1 = nn.Linear(config.embed_dim, config.ffn_dim)
        self.fc2 = nn.Linear(config.ffn_dim, config.embed_dim)
        self.ffn_layernorm = nn.LayerNorm(config.ffn_dim, eps=config.layernorm_eps) if config.sub_layernorm else None

    def forward(self, x_BNE: Tensor) -> Tensor:
        rows = max(1, FFN_SLICE_NUMBERS // self.fc1.out_features)
        if torch.is_grad_enabled() or x_BNE.shape[:-1].numel() <= rows:
            return self._rows(x_BNE)
        return torch.cat([self._rows(slice_TE) for slice_TE in x_BNE.flatten(0, 1).split(rows)]).view_as(x_BNE)

    def _rows(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))  # as torchscale
        hidden = self.activation(wide).to(hidden.dtype)
        return self.fc2(hidden if self.ffn_layernorm is None else self.ffn_layernorm(hidden))


class Layer(nn.Module):
    """Attention and feed-forward, each with a residual and a LayerNorm before it or after the sum."""

    def __init__(self, config: TorchscaleConfig, pattern: DilatedPattern, parallel: ContextParallel | None) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, pattern, parallel)
        self.self_attn_layer_norm = nn.LayerNorm(config.embed_dim, eps=config.layernorm_eps)
        self.ffn = TorchscaleFeedForward(config)
        self.final_layer_norm = nn.LayerNorm(config.embed_dim, eps=config.layernorm_eps)
        self.normalize_before, self.residual_scale = config.normalize_before, config.residual_scale
        with torch.no_grad():
            for linear in (self.self_attn.v_proj, self.self_attn.out_proj, self.ffn.fc1, self.ffn.fc2):
                linear.weight.mul_(config.initial_scale)
                linear.bias.mul_(config.initial_scale)

    def forward(self, x_BNE: Tensor, documents: Documents, attend: Attend) -> Tensor:
        if self.normalize_before:
            x_BNE = self._sum(x_BNE, self.self_attn(self.self_attn_layer_norm(x_BNE), documents, attend))
            return self._sum(x_BNE, self.ffn(self.final_layer_norm(x_BNE)))
        x_BNE = self.self_attn_layer_norm(self._sum(x_BNE, self.self_attn(x_BNE, documents, attend)))
        return self.final_layer_norm(self._sum(x_BNE, self.ffn(x_BNE)))

    def _sum(self, residual_BNE: Tensor, x_BNE: Tensor) -> Tensor:
        return (residual_BNE if self.residual_scale == 1.0 else residual_BNE * self.residual_scale) + x_BNE


class _LongNet(CheckedLoading):
    """What the encoder and the decoder share: all but causality."""

    is_causal: bool

    def __init__(
        self,
        config: TorchscaleConfig,
        *,
        parallel: ContextParallel | None = None,
        activation_checkpointing: Checkpointing = False,
    ) -> None:
        super().__init__()
        if not isinstance(config, TorchscaleConfig):
            raise ValueError(f"config must be a TorchscaleConfig, got {config!r}.")
        check_checkpointing(activation_checkpointing)
        if self.is_causal and config.num_decoder_layers is not None:
            raise ValueError(f"num_decoder_layers={config.num_decoder_layers} is for an encoder: a decoder takes None.")
        self.config = config
        self.parallel = parallel
        self.activation_checkpointing = activation_checkpointing
        self.pattern = config.pattern(is_causal=self.is_causal)
        check_objects(self.pattern, parallel, "auto")
        width, eps = config.embed_dim, config.layernorm_eps
        self.embed_tokens = None if config.num_tokens is None else nn.Embedding(config.num_tokens, width)
        learned = config.num_learned_positions
        self.embed_positions = None if learned is None else nn.Embedding(learned, width)
        self.layernorm_embedding = nn.LayerNorm(width, eps=eps) if config.layernorm_embedding else None
        self.layers = nn.ModuleList(Layer(config, self.pattern, parallel) for _ in range(config.num_layers))
        is_normalized = config.normalize_before and (self.is_causal or config.normalize_output)
        self.layer_norm = nn.LayerNorm(width, eps=eps) if is_normalized else None
        self.output_projection = None
        if config.num_logits is not None:
            self.output_projection = nn.Linear(width, config.num_logits, bias=False)
            nn.init.normal_(self.output_projection.weight, std=width**-0.5)
            if self.embed_tokens is not None and config.shares_embedding:
                self.output_projection.weight = self.embed_tokens.weight

    def forward(
        self,
        tokens_BN: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        collect: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor | list[Tensor]:
        """Tokens or embeddings to logits (B, N, V), or to (B, N, E) for a model without an output layer.

        Args:
            tokens_BN: integers (B, N).
            embeddings: (B, N, E). Learned positions are added to them too.
            cu_seqlens: as for `dilated_attention`: packed documents, batch 1. No document sees another.
            collect: a function of states (B, N, E). The forward then returns a list: the function's values for the
                embeddings and for each layer's output, before the last LayerNorm.

        Raises:
            ValueError: for input that does not fit, on every rank of `parallel`.
        """
        failure = self._failure(tokens_BN, embeddings)
        if not (collect is None or callable(collect)):
            failure = f"collect must be a function or None, got {collect!r}"
        x = embeddings if tokens_BN is None else tokens_BN
        fields: dict[str, object] = {"pattern": self.pattern, "collects": collect is not None}
        documents = agree_on_documents(
            type(self).__name__, x, parallel=self.parallel, cu_seqlens=cu_seqlens, fields=fields, failure=failure
        )
        x_BNE = self._embed(tokens_BN, embeddings, documents)
        attend: Any = partial(dilated_attention, parallel=self.parallel, cu_seqlens=cu_seqlens)
        if self.config.padding == "torchscale":
            counted = zero_rows(self.pattern, self.config.num_heads, documents, x_BNE)
            attend = partial(torchscale_attention, counted=counted, **attend.keywords)
        collected = [] if collect is None else [collect(x_BNE)]
        for layer in self.layers:
            x_BNE = run_layer(layer, x_BNE, documents, attend, recompute=self.activation_checkpointing)
            if collect is not None:
                collected.append(collect(x_BNE))
        if collect is not None:
            return collected
        x_BNE = x_BNE if self.layer_norm is None else self.layer_norm(x_BNE)
        return x_BNE if self.output_projection is None else self.output_projection(x_BNE)

    def _embed(self, tokens_BN: Tensor | None, embeddings: Tensor | None, documents: Documents) -> Tensor:
        if tokens_BN is not None and self.embed_tokens is not None:
            embeddings = self.embed_tokens(tokens_BN.long())
        assert embeddings is not None
        x_BNE = embeddings * math.sqrt(self.config.embed_dim) if self.config.scale_embedding else embeddings
        if self.embed_positions is not None:
            num_rows = self.embed_positions.num_embeddings
            if documents.longest > (learned := num_rows - FIRST_LEARNED_POSITION):  # on all ranks
                rows = f"{num_rows} rows, the first {FIRST_LEARNED_POSITION} of which are no positions"
                raise ValueError(f"a document has {documents.longest} positions, and {learned} were learned ({rows})")
            x_BNE = x_BNE + self.embed_positions(documents.positions().to(x_BNE.device) + FIRST_LEARNED_POSITION)
        return x_BNE if self.layernorm_embedding is None else self.layernorm_embedding(x_BNE)

    def _failure(self, tokens_BN: Tensor | None, embeddings: Tensor | None) -> str | None:
        """Why this rank's input does not fit, or None."""
        if (tokens_BN is None) == (embeddings is None):
            return "give tokens or embeddings=, one of the two"
        if embeddings is not None:
            if failure := why_not_dense(embeddings=embeddings):
                return failure
            if not embeddings.is_floating_point():
                return f"embeddings have dtype {embeddings.dtype}, not floating"
            if embeddings.dim() != 3 or embeddings.shape[-1] != self.config.embed_dim:
                return f"embeddings have shape {tuple(embeddings.shape)}, not (batch, N, {self.config.embed_dim})"
            return None
        if self.config.num_tokens is None:
            return "this model embeds no tokens (num_tokens=None): give embeddings= instead"
        return why_not_dense(tokens=tokens_BN) or why_no_tokens(tokens_BN, "num_tokens", self.config.num_tokens)


class LongNetEncoder(_LongNet):
    """torchscale's LongNetEncoder: every query sees keys before and after it.

    Args:
        config: the settings; `TorchscaleConfig.from_torchscale` reads those of torchscale.
        parallel: inputs and outputs are then the local shards of sequences that the ranks hold together.
        activation_checkpointing: keep only each layer's input and attention, and recompute the rest in backward.
            "offload" keeps these in the memory of the host.
    """

    is_causal = False


class LongNetDecoder(_LongNet):
    """torchscale's LongNetDecoder, without cross-attention: no query sees a later key. Arguments as for the encoder."""

    is_causal = True

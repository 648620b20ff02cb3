"""torchscale's LongNetEncoder as published weights use it, with torchscale's names of parameters.

Every published encoder takes embeddings and returns hidden states. It has LayerNorms before attention and feed-forward,
sub-LayerNorms inside both (MAGNETO, arXiv 2210.06423), and GELU.

Shape suffixes: B batch, N positions (this rank's under `parallel`), E embedding, T rows that a feed-forward computes at
a time.
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
from ...layers.numbered import NumberedModule
from ...layers.trained_with import RemembersPattern, check_before_loading
from ...ranks.context import ContextParallel
from ...ranks.named import called_by
from ...ranks.ranks import ALONE
from ..documents import Documents, agree_on_documents, why_not_dense
from ..recompute import check_checkpointing, run_layer
from .architecture import TorchscaleConfig
from .gate import torchscale_attention, zero_rows

# The attention of a layer: a function of (query, key, value, pattern). Bind any further tensors by functools.partial,
# because FSDP casts the arguments of a module to the module's dtype, but not bound tensors.
Attend = Callable[..., Tensor]

# Without gradients the feed-forward computes about this many hidden activations at a time.
FFN_SLICE_NUMBERS = 2**24


class SelfAttention(NumberedModule):
    """out_proj(subln(attention(q_proj x, k_proj x, v_proj x)))."""

    def __init__(self, config: TorchscaleConfig, parallel: ContextParallel | None) -> None:
        super().__init__()
        width = config.embed_dim
        self.num_heads = config.num_heads
        self.pattern = config.pattern
        self.share(parallel)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.inner_attn_ln = nn.LayerNorm(width)

    def forward(self, x_BNE: Tensor, attend: Attend) -> Tensor:
        heads = (self.num_heads, -1)
        query = self.q_proj(x_BNE).unflatten(-1, heads)
        key = self.k_proj(x_BNE).unflatten(-1, heads)
        value = self.v_proj(x_BNE).unflatten(-1, heads)
        with called_by(self.parallel, self._number):
            out_BNE = attend(query, key, value, self.pattern).flatten(2)
        del query, key, value  # frees two thirds of the layer's memory, if no gradients are needed
        return self.out_proj(self.inner_attn_ln(out_BNE))


class TorchscaleFeedForward(nn.Module):
    """fc2(subln(gelu(fc1 x)))."""

    def __init__(self, config: TorchscaleConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.embed_dim, config.ffn_dim)
        self.fc2 = nn.Linear(config.ffn_dim, config.embed_dim)
        self.ffn_layernorm = nn.LayerNorm(config.ffn_dim)

    def forward(self, x_BNE: Tensor) -> Tensor:
        num_rows = max(1, FFN_SLICE_NUMBERS // self.fc1.out_features)
        if torch.is_grad_enabled() or x_BNE.shape[:-1].numel() <= num_rows:
            return self._rows(x_BNE)
        slices_TE = x_BNE.flatten(0, 1).split(num_rows)
        return torch.cat([self._rows(slice_TE) for slice_TE in slices_TE]).view_as(x_BNE)

    def _rows(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        # Compute GELU in float32, as torchscale does.
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        return self.fc2(self.ffn_layernorm(F.gelu(wide).to(hidden.dtype)))


class Layer(nn.Module):
    """x + attention(ln(x)), then x + ffn(ln(x))."""

    def __init__(self, config: TorchscaleConfig, parallel: ContextParallel | None) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, parallel)
        self.self_attn_layer_norm = nn.LayerNorm(config.embed_dim)
        self.ffn = TorchscaleFeedForward(config)
        # The LayerNorm before the feed-forward, by torchscale's name.
        self.final_layer_norm = nn.LayerNorm(config.embed_dim)
        initial_scale = math.sqrt(math.log(2 * config.num_layers))  # as in MAGNETO
        with torch.no_grad():
            for linear in (
                self.self_attn.v_proj,
                self.self_attn.out_proj,
                self.ffn.fc1,
                self.ffn.fc2,
            ):
                linear.weight.mul_(initial_scale)
                linear.bias.mul_(initial_scale)

    def forward(self, x_BNE: Tensor, attend: Attend) -> Tensor:
        x_BNE = x_BNE + self.self_attn(self.self_attn_layer_norm(x_BNE), attend)
        return x_BNE + self.ffn(self.final_layer_norm(x_BNE))


class LongNetEncoder(nn.Module):
    """torchscale's LongNetEncoder. Its attention is not causal: a query attends to keys before and after it.

    By default rows of zeros, with which torchscale pads segments, take part in the softmax. Published weights need
    these rows. An encoder of your own does not need them:
    `LongNetEncoder(TorchscaleConfig(DilatedPattern(...), padding="exact"))`.

    Args:
        config: the settings. `TorchscaleConfig.from_torchscale` makes a config from torchscale's settings.
        parallel: the ranks that share the sequences. Inputs and outputs are then this rank's shards.
        activation_checkpointing: keep only each layer's input and attention, and recompute all else in backward.
    """

    def __init__(
        self,
        config: TorchscaleConfig,
        *,
        parallel: ContextParallel | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(config, TorchscaleConfig):
            raise ValueError(f"config must be a TorchscaleConfig, got {config!r}.")
        check_checkpointing(activation_checkpointing)
        self.pattern = config.pattern
        check_objects(self.pattern, parallel, "auto")
        self.config = config
        self.parallel = parallel
        self.activation_checkpointing = activation_checkpointing
        self.layers = nn.ModuleList(Layer(config, parallel) for _ in range(config.num_layers))
        self.layer_norm = nn.LayerNorm(config.embed_dim) if config.normalize_output else None
        self.trained_with: RemembersPattern | None = RemembersPattern()
        self.trained_with.pattern = config.pattern
        self.register_load_state_dict_pre_hook(check_before_loading)

    def forward(
        self,
        embeddings: Tensor,
        *,
        collect: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor | list[Tensor]:
        """Embeddings (B, N, E) to states (B, N, E).

        Args:
            collect: a function of a tensor (B, N, E), such as a mean over N. If given, it is called on the embeddings
                and on each layer's output, before the last LayerNorm. The forward then returns the list of the results
                of `collect`.

        Raises:
            ValueError: for input that does not fit, on every rank of `parallel`.
        """
        documents = agree_on_documents(
            "LongNetEncoder",
            embeddings,
            parallel=self.parallel,
            fields={"pattern": self.pattern, "collects": collect is not None},
            failure=self._why_not(embeddings),
        )
        attend = self._attention(documents, embeddings)
        x_BNE = embeddings
        collected = [] if collect is None else [collect(x_BNE)]
        for layer in self.layers:
            x_BNE = run_layer(layer, x_BNE, attend, recompute=self.activation_checkpointing)
            if collect is not None:
                collected.append(collect(x_BNE))
        if collect is not None:
            return collected
        return x_BNE if self.layer_norm is None else self.layer_norm(x_BNE)

    def _attention(self, documents: Documents, like: Tensor) -> Attend:
        attend: Any = partial(dilated_attention, parallel=self.parallel)
        if self.config.padding == "torchscale":
            ranks = ALONE if self.parallel is None else self.parallel.ranks
            counted = zero_rows(self.pattern, self.config.num_heads, documents, like, ranks)
            attend = partial(torchscale_attention, parallel=self.parallel, counted=counted)
        return attend

    def _why_not(self, embeddings: Any) -> str | None:
        """Why this rank's embeddings do not fit, or None if they fit."""
        # Allow tensors without data ("meta"): forecasts of memory run the encoder on them.
        is_meta = getattr(embeddings, "is_meta", False)
        if not is_meta and (failure := why_not_dense(embeddings=embeddings)):
            return failure
        if not embeddings.is_floating_point():
            return f"embeddings have dtype {embeddings.dtype}, not floating"
        if embeddings.dim() != 3 or embeddings.shape[-1] != self.config.embed_dim:
            return f"embeddings have shape {tuple(embeddings.shape)}, not (batch, N, {self.config.embed_dim})"
        return None

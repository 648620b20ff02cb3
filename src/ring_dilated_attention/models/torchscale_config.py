"""The shape of torchscale's LongNet models, by our names, and how to get it from torchscale's own. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ..pattern import DilatedPattern, is_integer

ACTIVATIONS = ("gelu", "relu", "swish")
PADDINGS = ("torchscale", "exact")
# Learned positions count from here, as in fairseq, whose first two rows mean something else.
FIRST_LEARNED_POSITION = 2


@dataclass(frozen=True)
class TorchscaleConfig:
    """All that decides the parameters and the function of a `LongNetEncoder` or `LongNetDecoder`, as torchscale's.

    Args:
        segment_lengths, dilation_rates: the branches; heads read phases by torchscale's blocked rule.
        num_tokens: tokens that have an embedding; None for a model of embeddings alone.
        num_logits: of the output layer; None for none.
        num_learned_positions: rows of a learned position embedding, two more than there are positions; None for none.
        shares_embedding: the output layer has the token embedding's weights.
        normalize_before: LayerNorm before attention and feed-forward (else after the residual).
        normalize_output: a last LayerNorm, for an encoder that normalises before; a decoder has it always then.
        scale_embedding: token embeddings times sqrt(embed_dim).
        sub_layernorm: MAGNETO's LayerNorms inside attention and feed-forward (arXiv 2210.06423).
        deepnorm: residuals times (2 * num_layers) ** (1/4) (DeepNet, arXiv 2203.00555).
        xpos_scale_base: of XPOS rotary positions (arXiv 2212.10554); None for none.
        padding: "torchscale" counts the zero rows that it pads with, "exact" does not.
    """

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    _: KW_ONLY
    num_layers: int = 12
    embed_dim: int = 768
    num_heads: int = 12
    ffn_dim: int = 3072
    num_tokens: int | None = None
    num_logits: int | None = None
    num_learned_positions: int | None = None
    shares_embedding: bool = False
    activation: str = "gelu"
    normalize_before: bool = True
    normalize_output: bool = True
    scale_embedding: bool = False
    layernorm_embedding: bool = False
    sub_layernorm: bool = True
    deepnorm: bool = False
    layernorm_eps: float = 1e-5
    xpos_scale_base: float | None = None
    padding: str = "torchscale"

    def __post_init__(self) -> None:
        pattern = self.pattern(is_causal=False)  # refuses bad branches
        object.__setattr__(self, "segment_lengths", pattern.segment_lengths)
        object.__setattr__(self, "dilation_rates", pattern.dilation_rates)
        for name in ("num_layers", "embed_dim", "num_heads", "ffn_dim"):
            if not is_integer(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number, at least 1.")
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim={self.embed_dim} is not a multiple of num_heads={self.num_heads} (remainder "
                f"{self.embed_dim % self.num_heads}): choose a number of heads that divides it."
            )
        if self.xpos_scale_base is not None and self.head_dim % 2:
            raise ValueError(f"xpos with a head dim of {self.head_dim}: it rotates pairs, the head dim must be even.")
        for name, choices in (("activation", ACTIVATIONS), ("padding", PADDINGS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {choices}.")
        if self.shares_embedding and (self.num_tokens is None or self.num_tokens != self.num_logits):
            sizes = f"num_tokens={self.num_tokens} and num_logits={self.num_logits}"
            raise ValueError(
                f"shares_embedding=True, but {sizes}: the embedding and the output layer then have one size."
            )
        if self.deepnorm and self.sub_layernorm:
            raise ValueError(
                "deepnorm=True is for models without sub-LayerNorms: pass sub_layernorm=False, as torchscale does by "
                "itself."
            )

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    def pattern(self, *, is_causal: bool) -> DilatedPattern:
        return DilatedPattern(self.segment_lengths, self.dilation_rates, is_causal=is_causal, phase="blocked")

    @classmethod
    def from_torchscale(
        cls,
        settings: Mapping[str, Any],
        *,
        side: str | None = None,
        num_tokens: int | None = None,
        num_learned_positions: int | None = None,
        padding: str = "torchscale",
    ) -> "TorchscaleConfig":
        """From torchscale's EncoderConfig, DecoderConfig or EncoderDecoderConfig, as the dict that `vars` makes of it.

        Args:
            side: "encoder" or "decoder", which an EncoderDecoderConfig leaves open; by default the only one there is.
            num_tokens, num_learned_positions: rows of the embeddings that the model was given, which its config does
                not know: of embed_tokens.weight and embed_positions.weight in its checkpoint. None for none.

        Raises:
            ValueError: for what is not served: mixtures of experts, multiway networks, relative positions; and for
                settings of both sides without a word which.
        """
        side = _side(settings, side)
        for name, why in _REFUSED.items():
            if settings.get(name):
                raise ValueError(f"torchscale's {name}={settings[name]!r} is not served: {why}.")
        given = {
            ours: settings[theirs.format(side=side)]
            for ours, theirs in _NAMES.items()
            if theirs.format(side=side) in settings
        }
        for name in ("segment_lengths", "dilation_rates"):
            if isinstance(given.get(name), str):
                given[name] = _integers(name, given[name])
            if not given.get(name):
                raise ValueError(f"torchscale's settings have no {_NAMES[name]}: these are not those of a LongNet.")
        has_output_layer = not settings.get("no_output_layer") and settings.get("vocab_size", -1) > 0
        if settings.get("deepnorm"):
            given["sub_layernorm"] = False
        if side == "encoder":  # of a decoder torchscale's configs leave it as it was
            given["normalize_before"] = not settings.get("deepnorm") and (
                given.get("sub_layernorm", True) or given.get("normalize_before", True)
            )
        return cls(
            **given,
            num_tokens=num_tokens,
            num_logits=settings["vocab_size"] if has_output_layer else None,
            num_learned_positions=num_learned_positions,
            scale_embedding=not settings.get("no_scale_embedding", True),
            xpos_scale_base=settings.get("xpos_scale_base", 512) if settings.get("xpos_rel_pos") else None,
            padding=padding,
        )


_NAMES = {
    "segment_lengths": "segment_length",
    "dilation_rates": "dilated_ratio",
    "num_layers": "{side}_layers",
    "embed_dim": "{side}_embed_dim",
    "num_heads": "{side}_attention_heads",
    "ffn_dim": "{side}_ffn_embed_dim",
    "shares_embedding": "share_{side}_input_output_embed",
    "activation": "activation_fn",
    "normalize_before": "{side}_normalize_before",
    "normalize_output": "normalize_output",
    "layernorm_embedding": "layernorm_embedding",
    "sub_layernorm": "subln",
    "deepnorm": "deepnorm",
    "layernorm_eps": "layernorm_eps",
}
_REFUSED = {
    "moe_freq": "mixtures of experts have other parameters",
    "multiway": "multiway networks have other parameters",
    "rel_pos_buckets": "torchscale's own dilated attention takes no relative positions",
}


def _side(settings: Mapping[str, Any], side: str | None) -> str:
    sides = ("encoder", "decoder")
    if side not in (None, *sides):
        raise ValueError(f"side={side!r} is unknown; choose one of {sides}.")
    # Not by any name: a DecoderConfig has encoder_normalize_before too.
    there = [each for each in sides if f"{each}_layers" in settings or f"{each}_embed_dim" in settings]
    if side is not None and side not in there:
        raise ValueError(f"side={side!r}, but the settings have neither {side}_layers nor {side}_embed_dim.")
    if side is None and len(there) == 2:
        raise ValueError("the settings have encoder_layers and decoder_layers: pass side='encoder' or side='decoder'.")
    return side or (there or sides)[0]


def _integers(name: str, text: str) -> list[int]:
    """torchscale writes "[1024, 2048]" and evaluates it."""
    try:
        return [int(part) for part in text.strip().strip("[]()").split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a list of integers.") from None

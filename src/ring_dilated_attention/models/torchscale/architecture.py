"""The configuration of torchscale's LongNet models, made from torchscale's settings. The file imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Integral
from typing import Any

from ...pattern import DilatedPattern, is_finite_number, is_integer

ACTIVATIONS = ("gelu", "relu", "swish")
PADDINGS = ("torchscale", "exact")
SIDES = ("encoder", "decoder")
# The row of position 0 in a learned position embedding. As in fairseq, the two rows before it are not positions.
FIRST_LEARNED_POSITION = 2


def checked_size(name: str, number: Any) -> float:
    """A number as Python's int or float, since numpy's numbers overflow. ValueError unless positive and finite."""
    if not is_finite_number(number) or number <= 0:
        raise ValueError(f"{name}={number!r} must be a number, positive and finite.")
    return int(number) if isinstance(number, Integral) else float(number)


@dataclass(frozen=True)
class TorchscaleConfig:
    """The settings that decide the parameters and the function of a `LongNetEncoder` or `LongNetDecoder`.

    Args:
        segment_lengths, dilation_rates: the branches; heads read phases by torchscale's blocked rule.
        num_tokens: tokens that have an embedding; None for a model that is given embeddings.
        num_logits: the width of the output layer; None for none.
        num_learned_positions: rows of a learned position embedding, two more than there are positions; None for none.
        shares_embedding: the output layer has the token embedding's weights.
        normalize_before: LayerNorm before attention and feed-forward (else after the residual).
        normalize_output: with normalize_before, a LayerNorm at the end of an encoder. A decoder then always has one.
        scale_embedding: token embeddings times sqrt(embed_dim).
        sub_layernorm: MAGNETO's LayerNorms inside attention and feed-forward (arXiv 2210.06423).
        deepnorm: residuals times `residual_scale` (DeepNet, arXiv 2203.00555).
        num_decoder_layers: layers of the decoder, if this is the encoder of an encoder-decoder; else None. The
            encoder's `residual_scale` and `initial_scale` depend on it.
        xpos_scale_base: the scale base of XPOS rotary positions (arXiv 2212.10554); None for a model without them.
        padding: "torchscale" counts the zero rows that torchscale pads with, "exact" does not.
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
    num_decoder_layers: int | None = None
    layernorm_eps: float = 1e-5
    xpos_scale_base: float | None = None
    padding: str = "torchscale"

    def __post_init__(self) -> None:
        pattern = self.pattern(is_causal=False)  # refuses bad branches
        object.__setattr__(self, "segment_lengths", pattern.segment_lengths)
        object.__setattr__(self, "dilation_rates", pattern.dilation_rates)
        optional = ("num_tokens", "num_logits", "num_learned_positions", "num_decoder_layers")
        given = [name for name in optional if getattr(self, name) is not None]
        for name in ("num_layers", "embed_dim", "num_heads", "ffn_dim", *given):
            if not is_integer(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number, at least 1.")
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim={self.embed_dim} is not a multiple of num_heads={self.num_heads} (remainder "
                f"{self.embed_dim % self.num_heads}): choose a number of heads that divides it."
            )
        for switch in (field.name for field in fields(self) if field.type is bool):
            if not isinstance(getattr(self, switch), bool):
                raise ValueError(f"{switch}={getattr(self, switch)!r} must be True or False.")
        for name in ("layernorm_eps", *(["xpos_scale_base"] if self.xpos_scale_base is not None else [])):
            checked_size(name, getattr(self, name))
        if self.xpos_scale_base is not None and self.head_dim % 2:
            raise ValueError(f"xpos with a head dim of {self.head_dim}: it rotates pairs, the head dim must be even.")
        for name, choices in (("activation", ACTIVATIONS), ("padding", PADDINGS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {choices}.")
        if self.shares_embedding and (self.num_tokens is None or self.num_tokens != self.num_logits):
            raise ValueError(
                f"shares_embedding=True, but num_tokens={self.num_tokens} and num_logits={self.num_logits} differ."
            )
        if self.deepnorm and self.sub_layernorm:
            raise ValueError("deepnorm=True is for models without sub-LayerNorms: pass sub_layernorm=False.")

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def residual_scale(self) -> float:
        """The factor of each residual."""
        if not self.deepnorm:
            return 1.0
        if self.num_decoder_layers is None:
            return (2.0 * self.num_layers) ** 0.25
        return 0.81 * (self.num_layers**4 * self.num_decoder_layers) ** 0.0625

    @property
    def initial_scale(self) -> float:
        """The factor of the initial weights and biases of value, output and feed-forward (DeepNet, MAGNETO)."""
        layers, decoder_layers = self.num_layers, self.num_decoder_layers
        if self.deepnorm:
            return (8.0 * layers) ** -0.25 if decoder_layers is None else 1.15 * (layers**4 * decoder_layers) ** -0.0625
        if not self.sub_layernorm:
            return 1.0
        share = 1.0 if decoder_layers is None else math.log(3 * decoder_layers) / 3
        return math.sqrt(share * math.log(2 * layers))

    def pattern(self, *, is_causal: bool) -> DilatedPattern:
        return DilatedPattern(self.segment_lengths, self.dilation_rates, is_causal=is_causal, phase="blocked")

    @classmethod
    def from_torchscale(
        cls,
        settings: Mapping[str, Any],
        *,
        side: str | None = None,
        is_encoder_decoder: bool | None = None,
        num_tokens: int | None = None,
        num_learned_positions: int | None = None,
        padding: str = "torchscale",
    ) -> "TorchscaleConfig":
        """From torchscale's EncoderConfig, DecoderConfig or EncoderDecoderConfig, as the dict that `vars` makes of it.

        The settings dropout, attention_dropout, activation_dropout and drop_path_rate are not read: these models have
        no dropout. torchscale's dilated attention has its attention dropout in eval mode too.

        Args:
            side: "encoder" or "decoder". Needed for an EncoderDecoderConfig, which has both.
            is_encoder_decoder: whether the model is one side of an encoder-decoder. Its encoder has no output layer.
                The default is True if the settings have both sides, else False.
            num_tokens, num_learned_positions: rows of embed_tokens.weight and embed_positions.weight in the checkpoint,
                which torchscale's config does not know. None for none.

        Raises:
            ValueError: for what is not supported (mixtures of experts, multiway networks, relative positions,
                cross-attention), and for settings of both sides without `side`.
        """
        is_encoder_decoder = len(_sides(settings)) == 2 if is_encoder_decoder is None else is_encoder_decoder
        side = _side(settings, side)
        num_decoder_layers = _num_decoder_layers(settings, side) if is_encoder_decoder else None
        for name, why in _REFUSED.items():
            if settings.get(name):
                raise ValueError(f"torchscale's {name}={settings[name]!r} is not supported: {why}.")
        given = {ours: settings[key] for ours, name in _NAMES.items() if (key := name.format(side=side)) in settings}
        for name in ("segment_lengths", "dilation_rates"):
            if isinstance(given.get(name), str):
                given[name] = _integers(name, given[name])
            if not given.get(name):
                raise ValueError(f"torchscale's settings have no {_NAMES[name]}: these are not those of a LongNet.")
        num_logits = settings.get("vocab_size", -1)
        if not is_integer(num_logits):
            raise ValueError(f"torchscale's vocab_size={num_logits!r} must be a whole number.")
        has_output_layer = not is_encoder_decoder and not settings.get("no_output_layer") and num_logits > 0
        if not has_output_layer:  # torchscale then ignores the setting
            given["shares_embedding"] = False
        if settings.get("deepnorm"):
            given["sub_layernorm"] = False
        if side == "encoder":  # torchscale changes no decoder's normalize_before
            normalizes = given.get("sub_layernorm", True) or given.get("normalize_before", True)
            given["normalize_before"] = not settings.get("deepnorm") and normalizes
        return cls(
            **given,
            num_tokens=num_tokens,
            num_logits=num_logits if has_output_layer else None,
            num_learned_positions=num_learned_positions,
            num_decoder_layers=num_decoder_layers,
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
    "sub_layernorm": "subln",
    **{name: name for name in ("normalize_output", "layernorm_embedding", "deepnorm", "layernorm_eps")},
}
_REFUSED = {
    "moe_freq": "mixtures of experts have other parameters",
    "multiway": "multiway networks have other parameters",
    "rel_pos_buckets": "torchscale's own dilated attention takes no relative positions",
}


def _sides(settings: Mapping[str, Any]) -> list[str]:
    # Only these two names tell the side: a DecoderConfig has encoder_normalize_before too.
    return [each for each in SIDES if f"{each}_layers" in settings or f"{each}_embed_dim" in settings]


def _side(settings: Mapping[str, Any], side: str | None) -> str:
    if side not in (None, *SIDES):
        raise ValueError(f"side={side!r} is unknown; choose one of {SIDES}.")
    there = _sides(settings)
    if side is None and len(there) == 2:
        raise ValueError("the settings have encoder_layers and decoder_layers: pass side='encoder' or side='decoder'.")
    if side is not None and side not in there:
        raise ValueError(f"side={side!r}, but the settings have neither {side}_layers nor {side}_embed_dim.")
    return side or (there or SIDES)[0]


def _num_decoder_layers(settings: Mapping[str, Any], side: str) -> Any:
    if side == "decoder":
        remedy = "pass is_encoder_decoder=False for a decoder that stands alone."
        raise ValueError(f"the decoder of an encoder-decoder has cross-attention, which is not supported: {remedy}")
    if settings.get("decoder_layers") is None:
        raise ValueError(
            "is_encoder_decoder=True, but the settings have no decoder_layers, on which an encoder's scales depend: "
            "add it, or pass is_encoder_decoder=False."
        )
    return settings["decoder_layers"]


def _integers(name: str, text: str) -> list[int]:
    """Integers from text such as "[1024, 2048]", which torchscale evaluates."""
    try:
        return [int(number) for number in text.strip().strip("[]()").split(",") if number.strip()]
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a list of integers.") from None

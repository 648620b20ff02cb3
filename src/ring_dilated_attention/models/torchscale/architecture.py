"""The configuration of torchscale's LongNetEncoder, made from torchscale's settings. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ...pattern import DilatedPattern, is_integer

PADDINGS = ("torchscale", "exact")
# Maps fields of TorchscaleConfig to torchscale's names for the same settings.
TORCHSCALE_NAMES = {
    "segment_lengths": "segment_length",
    "dilation_rates": "dilated_ratio",
    "num_layers": "encoder_layers",
    "embed_dim": "encoder_embed_dim",
    "num_heads": "encoder_attention_heads",
    "ffn_dim": "encoder_ffn_embed_dim",
    "normalize_output": "normalize_output",
}
# torchscale's settings that have the same value in every published encoder. `from_torchscale` refuses any other value,
# which would change the function or the parameters.
PUBLISHED_SETTINGS: dict[str, Any] = {
    "decoder_layers": None,
    "encoder_normalize_before": True,
    "subln": True,
    "deepnorm": False,
    "activation_fn": "gelu",
    "layernorm_eps": 1e-5,
    "no_scale_embedding": True,
    "layernorm_embedding": False,
    "xpos_rel_pos": False,
    "rel_pos_buckets": 0,
    "moe_freq": 0,
    "multiway": False,
}


@dataclass(frozen=True)
class TorchscaleConfig:
    """The settings that decide the parameters and the function of a `LongNetEncoder`.

    Args:
        segment_lengths, dilation_rates: the branches, with torchscale's rule for heads (phase="blocked"). For any other
            pattern pass a `DilatedPattern` as segment_lengths, no dilation_rates, and padding="exact".
        normalize_output: whether there is a LayerNorm after the last layer. GigaPath's encoders have this LayerNorm,
            and LongViT's encoder has none.
        padding: torchscale fills up segments with rows of zeros, which take part in the softmax. "torchscale" includes
            these rows, which published weights need. "exact" leaves these rows out: choose it for an encoder that you
            train from scratch.
    """

    segment_lengths: Sequence[int] | DilatedPattern
    dilation_rates: Sequence[int] = ()
    _: KW_ONLY
    num_layers: int = 12
    embed_dim: int = 768
    num_heads: int = 12
    ffn_dim: int = 3072
    normalize_output: bool = True
    padding: str = "torchscale"

    def __post_init__(self) -> None:
        pattern = self.pattern  # raises ValueError for bad branches
        if isinstance(self.segment_lengths, DilatedPattern):
            if self.dilation_rates or self.padding != "exact":
                raise ValueError(
                    f"padding={self.padding!r} and dilation_rates={self.dilation_rates} with {pattern}: with a "
                    "DilatedPattern leave out dilation_rates, and pass padding='exact'. Only torchscale's own patterns "
                    "have its zero rows."
                )
        else:
            object.__setattr__(self, "segment_lengths", pattern.segment_lengths)
            object.__setattr__(self, "dilation_rates", pattern.dilation_rates)
        for name in ("num_layers", "embed_dim", "num_heads", "ffn_dim"):
            number = getattr(self, name)
            if not is_integer(number) or number < 1:
                raise ValueError(f"{name}={number!r} must be a whole number, at least 1.")
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim={self.embed_dim} is not a multiple of num_heads={self.num_heads} (remainder "
                f"{self.embed_dim % self.num_heads}): choose a number of heads that divides it."
            )
        if not isinstance(self.normalize_output, bool):
            raise ValueError(f"normalize_output={self.normalize_output!r} must be True or False.")
        if self.padding not in PADDINGS:
            raise ValueError(f"padding={self.padding!r} is unknown; choose one of {PADDINGS}.")

    @property
    def pattern(self) -> DilatedPattern:
        if isinstance(self.segment_lengths, DilatedPattern):
            return self.segment_lengths
        return DilatedPattern(
            self.segment_lengths, self.dilation_rates, is_causal=False, phase="blocked"
        )

    @classmethod
    def from_torchscale(
        cls, settings: Mapping[str, Any], *, padding: str = "torchscale"
    ) -> "TorchscaleConfig":
        """The config of the encoder that torchscale makes from these settings.

        Four settings are not read, because this encoder has no dropout: dropout, attention_dropout, activation_dropout
        and drop_path_rate. With attention_dropout torchscale's outputs differ from ours even in eval mode, because its
        dilated attention applies attention_dropout in eval mode too.

        Args:
            settings: torchscale's names and values: `vars(encoder_config)`, or the keywords of an EncoderConfig.
            padding: as for `TorchscaleConfig`.

        Raises:
            ValueError: for a setting with a value that no published encoder has, and if the branches are missing.
        """
        for name, published in PUBLISHED_SETTINGS.items():
            value = settings.get(name, published)
            if value != published:
                raise ValueError(
                    f"torchscale's {name}={value!r} is not supported: every published encoder has {name}={published!r}."
                )
        vocab_size = settings.get("vocab_size", -1)
        if not is_integer(vocab_size):
            raise ValueError(f"torchscale's vocab_size={vocab_size!r} must be a whole number.")
        if vocab_size > 0 and not settings.get("no_output_layer"):
            raise ValueError(
                f"torchscale's vocab_size={vocab_size} adds an output layer, and no published encoder has one: set "
                "no_output_layer=True, and apply a layer of your own to the states."
            )
        fields = {
            ours: settings[theirs]
            for ours, theirs in TORCHSCALE_NAMES.items()
            if theirs in settings
        }
        for name in ("segment_lengths", "dilation_rates"):
            numbers = fields.get(name)
            if not numbers:
                raise ValueError(
                    f"torchscale's settings have no {TORCHSCALE_NAMES[name]}: they are not the settings of a LongNet."
                )
            if isinstance(numbers, str):
                fields[name] = _integers(name, numbers)
        return cls(**fields, padding=padding)


def _integers(name: str, text: str) -> list[int]:
    """The integers in a text such as "[1024, 2048]". torchscale's settings may be such texts."""
    try:
        return [int(number) for number in text.strip().strip("[]()").split(",") if number.strip()]
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a list of integers.") from None

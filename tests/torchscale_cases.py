"""What torchscale and GigaPath compute on a few small inputs. `python tests/torchscale_cases.py` runs the original code
from a checkout (see tests/checkout.py) and writes data/torchscale.safetensors. Tests compare with that file, and
with the original itself where there is a checkout.

Inputs and weights are cosines, so that only results are kept.
"""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ring_dilated_attention.models import (
    LongNetDecoder,
    LongNetEncoder,
    LongNetViT,
    TorchscaleConfig,
    segment_lengths_for,
)
from ring_dilated_attention.models.longnet_vit import DILATION_RATES
from ring_dilated_attention.pattern import DilatedPattern

FILE = Path(__file__).with_name("data") / "torchscale.safetensors"


def waves(*shape: int, seed: int = 0) -> Tensor:
    """Numbers between -1 and 1 that look random, the same wherever they are made."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.cos(count * 12.9898 + seed * 0.7).view(shape)


def fill(module: nn.Module) -> nn.Module:
    """Give every parameter waves of a size that keeps activations of the order of 1."""
    with torch.no_grad():
        for seed, (name, x) in enumerate(sorted(module.named_parameters())):
            width = x.shape[-1] if x.dim() > 1 else 16
            is_scale = name.endswith("weight") and ("norm" in name or "_ln" in name)
            x.copy_(1.5 * width**-0.5 * waves(*x.shape, seed=seed) + is_scale)
    return module.eval()


class Attention(NamedTuple):
    """One call of the attention."""

    pattern: DilatedPattern
    length: int
    num_heads: int = 4
    batch: int = 1

    def inputs(self) -> list[Tensor]:
        return [2 * waves(self.batch, self.length, self.num_heads, 4, seed=seed) for seed in range(3)]

    def original(self) -> Tensor:
        from checkout import attention_module

        module = attention_module(self.pattern, self.num_heads, 4)
        out, _ = module(*(x.flatten(2) for x in self.inputs()), is_causal=self.pattern.is_causal)
        return out.unflatten(2, (self.num_heads, 4))


def blocked(segment_lengths: tuple[int, ...], rates: tuple[int, ...], is_causal: bool = False) -> DilatedPattern:
    return DilatedPattern(segment_lengths, rates, is_causal=is_causal, phase="blocked")


ATTENTION = {
    "divides": Attention(blocked((8, 16, 32), (1, 2, 4)), 32, batch=2),
    "ragged": Attention(blocked((8, 16, 32), (1, 2, 4)), 27),
    "short": Attention(blocked((16, 64, 256), (2, 4, 8)), 21, num_heads=5),
    "misaligned": Attention(blocked((8, 13, 7), (1, 4, 2)), 29),
    "wide rates": Attention(blocked((3, 2, 16), (5, 3, 4)), 23),
    "causal": Attention(blocked((8, 16), (1, 2), True), 27),
    "causal, misaligned": Attention(blocked((13, 7), (4, 3), True), 29, num_heads=3, batch=2),
}


class Slide(NamedTuple):
    """One slide encoder of 2 layers of 32, 16 heads, on a batch of two slides."""

    max_wsi_size: int
    num_tiles: int
    global_pool: bool

    def model(self, **options: Any) -> LongNetViT:
        sizes = {"slide_ngrids": 20, "segment_lengths": segment_lengths_for(self.max_wsi_size)}
        model = LongNetViT(
            5, 32, 2, 16, **sizes, dilation_rates=DILATION_RATES, global_pool=self.global_pool, **options
        )
        return fill(model.double())

    def inputs(self) -> tuple[Tensor, Tensor]:
        x = waves(2, self.num_tiles, 5)
        return x, (waves(2, self.num_tiles, 2, seed=1) + 1) * 10 * 256 * 0.999

    def original(self, all_layer_embed: bool) -> Tensor:
        from checkout import activations_in_float64, slide_encoder

        sizes = {"slide_ngrids": 20, "max_wsi_size": self.max_wsi_size}
        model = fill(slide_encoder(5, 32, 2, **sizes, global_pool=self.global_pool).double())
        model.pos_embed = self._table(model)
        with activations_in_float64(), torch.no_grad():
            return torch.stack(model(*self.inputs(), all_layer_embed=all_layer_embed))

    @staticmethod
    def _table(model: nn.Module) -> Tensor:
        """Its table of positions, which it rounds to float32."""
        import importlib

        made = importlib.import_module("gigapath.pos_embed").get_2d_sincos_pos_embed(32, 20, cls_token=True)
        return torch.from_numpy(made).unsqueeze(0)


SLIDES = {
    "aligned, pooled": Slide(2048, 93, True),
    "aligned, class token": Slide(2048, 93, False),
    "misaligned, pooled": Slide(1024, 60, True),  # segments of 1024, 362, 128, 45 and 16
}


class Sequence(NamedTuple):
    """One torchscale encoder or decoder of 2 layers of 16 over 11 tokens."""

    is_causal: bool
    length: int
    options: dict[str, Any]
    num_learned_positions: int | None = None
    num_decoder_layers: int | None = None  # of an encoder-decoder, of which this is the encoder

    @property
    def side(self) -> str:
        return "decoder" if self.is_causal else "encoder"

    def settings(self) -> dict[str, Any]:
        """As torchscale's EncoderConfig and DecoderConfig take them."""
        shape = {"embed_dim": 16, "attention_heads": 4, "ffn_embed_dim": 24, "layers": 2}
        branches = {"segment_length": "[8, 16]", "dilated_ratio": "[1, 2]"}
        common = {"vocab_size": 11, "flash_attention": True, **branches}
        if self.num_decoder_layers is not None:
            common["decoder_layers"] = self.num_decoder_layers
        return {**{f"{self.side}_{name}": x for name, x in shape.items()}, **common, **self.options}

    def model(self, settings: dict[str, Any] | None = None, **options: Any) -> LongNetEncoder | LongNetDecoder:
        config = TorchscaleConfig.from_torchscale(
            settings or self.settings(),
            side=self.side,
            num_tokens=11,
            num_learned_positions=self.num_learned_positions,
        )
        kind = LongNetDecoder if self.is_causal else LongNetEncoder
        return fill(kind(config, **options).double())

    def tokens(self) -> Tensor:
        return (torch.arange(2 * self.length) ** 2 % 11).view(2, self.length)

    def original_config(self, **settings: Any) -> Any:
        from checkout import torchscale

        kind = self.side.capitalize() if self.num_decoder_layers is None else "EncoderDecoder"
        return getattr(torchscale("architecture.config"), f"{kind}Config")(**self.settings(), **settings)

    def original_model(self, **settings: Any) -> Any:
        """Its parameters are as torchscale initialises them."""
        from checkout import torchscale

        models = torchscale("model.LongNet")
        learned = None
        if self.num_learned_positions is not None:
            learned = torchscale("component.embedding").PositionalEmbedding(self.num_learned_positions, 16)
        kind = models.LongNetDecoder if self.is_causal else models.LongNetEncoder
        is_decoder_left_out = self.num_decoder_layers is not None
        tokens = nn.Embedding(11, 16)
        return kind(self.original_config(**settings), tokens, learned, is_encoder_decoder=is_decoder_left_out).double()

    def original(self) -> Tensor:
        from checkout import activations_in_float64

        with activations_in_float64(), torch.no_grad():
            found = fill(self.original_model())(self.tokens())
        return found[0] if self.is_causal else found["encoder_out"]


SEQUENCES = {
    "encoder": Sequence(False, 21, {}),
    "encoder, learned positions": Sequence(
        False, 21, {"no_scale_embedding": False, "layernorm_embedding": True, "activation_fn": "relu"}, 23
    ),
    "encoder, deepnorm": Sequence(False, 32, {"deepnorm": True, "subln": False}),
    "encoder of an encoder-decoder": Sequence(False, 21, {}, num_decoder_layers=3),
    "encoder of an encoder-decoder, deepnorm": Sequence(
        False, 32, {"deepnorm": True, "subln": False}, num_decoder_layers=3
    ),
    "decoder, deepnorm": Sequence(True, 32, {"deepnorm": True, "subln": False}),
    "decoder, normalised afterwards": Sequence(True, 21, {"decoder_normalize_before": False}),
    "encoder, xpos": Sequence(False, 21, {"xpos_rel_pos": True, "no_output_layer": True}),
    "decoder": Sequence(True, 21, {"share_decoder_input_output_embed": True}),
    "decoder, xpos": Sequence(True, 21, {"xpos_rel_pos": True, "activation_fn": "swish"}),
}


def results() -> dict[str, Tensor]:
    """All that the original code computes, by name."""
    found = {f"attention: {name}": case.original() for name, case in ATTENTION.items()}
    for name, slide in SLIDES.items():
        found[f"slide: {name}"] = slide.original(all_layer_embed=False)
        found[f"slide, all layers: {name}"] = slide.original(all_layer_embed=True)
    return found | {f"sequence: {name}": case.original() for name, case in SEQUENCES.items()}


def kept() -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(FILE)


if __name__ == "__main__":
    from safetensors.torch import save_file

    FILE.parent.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(None):
        tensors = {name: x.contiguous() for name, x in results().items()}
    save_file(tensors, FILE, metadata={"made by": "python tests/torchscale_cases.py"})
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")

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
    LongNetEncoder,
    LongNetViT,
    TorchscaleConfig,
    segment_lengths_for,
)
from ring_dilated_attention.models.longnet_vit import DILATION_RATES, PublishedSize
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
        return [
            2 * waves(self.batch, self.length, self.num_heads, 4, seed=seed) for seed in range(3)
        ]

    def original(self) -> Tensor:
        from checkout import attention_module

        module = attention_module(self.pattern, self.num_heads, 4)
        out, _ = module(*(x.flatten(2) for x in self.inputs()), is_causal=self.pattern.is_causal)
        return out.unflatten(2, (self.num_heads, 4))


def blocked(
    segment_lengths: tuple[int, ...], rates: tuple[int, ...], is_causal: bool = False
) -> DilatedPattern:
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


TINY = PublishedSize(5, 32, 2)  # a size that tests take for a published one


class Slide(NamedTuple):
    """One slide encoder of 2 layers of 32, 16 heads, on a batch of two slides."""

    max_wsi_size: int
    num_tiles: int
    global_pool: bool

    def model(self, **options: Any) -> LongNetViT:
        sizes = {"slide_ngrids": 20, "segment_lengths": segment_lengths_for(self.max_wsi_size)}
        model = LongNetViT(
            5,
            32,
            2,
            16,
            **sizes,
            dilation_rates=DILATION_RATES,
            global_pool=self.global_pool,
            **options,
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

        made = importlib.import_module("gigapath.pos_embed").get_2d_sincos_pos_embed(
            32, 20, cls_token=True
        )
        return torch.from_numpy(made).unsqueeze(0)


SLIDES = {
    "aligned, pooled": Slide(2048, 93, True),
    "aligned, class token": Slide(2048, 93, False),
    "misaligned, pooled": Slide(1024, 60, True),  # segments of 1024, 362, 128, 45 and 16
}


class Encoder(NamedTuple):
    """One torchscale encoder of 2 layers of 16, which is given embeddings."""

    length: int
    options: dict[str, Any]

    def settings(self) -> dict[str, Any]:
        """As torchscale's EncoderConfig takes them."""
        sizes = {
            "encoder_embed_dim": 16,
            "encoder_attention_heads": 4,
            "encoder_ffn_embed_dim": 24,
            "encoder_layers": 2,
        }
        return {
            **sizes,
            "segment_length": "[8, 16]",
            "dilated_ratio": "[1, 2]",
            "flash_attention": True,
            **self.options,
        }

    def model(self, settings: dict[str, Any] | None = None, **options: Any) -> LongNetEncoder:
        config = TorchscaleConfig.from_torchscale(settings or self.settings())
        return fill(LongNetEncoder(config, **options).double())

    def embeddings(self) -> Tensor:
        return waves(2, self.length, 16)

    def original_config(self) -> Any:
        from checkout import torchscale

        return torchscale("architecture.config").EncoderConfig(**self.settings())

    def original_model(self) -> Any:
        """Its parameters are as torchscale initialises them."""
        from checkout import torchscale

        return torchscale("model.LongNet").LongNetEncoder(self.original_config()).double()

    def original(self) -> Tensor:
        from checkout import activations_in_float64

        with activations_in_float64(), torch.no_grad():
            return fill(self.original_model())(src_tokens=None, token_embeddings=self.embeddings())[
                "encoder_out"
            ]


# The settings that the code of published weights sets, beside sizes and dropout.
ENCODERS = {
    "GigaPath": Encoder(
        21, {"block_shift": True, "use_xmoe": False, "moe_top1_expert": False, "moe_freq": 0}
    ),
    "LongViT": Encoder(
        27,
        {
            "vocab_size": 64010,
            "multiway": False,
            "layernorm_embedding": False,
            "normalize_output": False,
            "no_output_layer": True,
        },
    ),
    "misaligned": Encoder(29, {"segment_length": "[8, 13]", "dilated_ratio": "[1, 4]"}),
}


def results() -> dict[str, Tensor]:
    """All that the original code computes, by name."""
    found = {f"attention: {name}": case.original() for name, case in ATTENTION.items()}
    for name, slide in SLIDES.items():
        found[f"slide: {name}"] = slide.original(all_layer_embed=False)
        found[f"slide, all layers: {name}"] = slide.original(all_layer_embed=True)
    return found | {f"encoder: {name}": case.original() for name, case in ENCODERS.items()}


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

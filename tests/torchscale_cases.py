"""A few small inputs. data/torchscale.safetensors holds what torchscale (4d1e0e8) and GigaPath (09d8e87) compute of
them: `python tests/torchscale_cases.py` of commit 9f385f8f ran the original code, and wrote the file.

Inputs and weights are cosines, so that only results are kept.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.models import (
    LongNetEncoder,
    LongNetViT,
    TorchscaleConfig,
    segment_lengths_for,
)
from ring_dilated_attention.models.longnet_vit import DILATION_RATES, PublishedSize
from ring_dilated_attention.pattern import DilatedPattern

FILE = Path(__file__).with_name("data") / "torchscale.safetensors"


def waves(*shape, seed=0):
    """Numbers between -1 and 1 that look random, the same wherever they are made."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.cos(count * 12.9898 + seed * 0.7).view(shape)


def fill(module):
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

    def inputs(self):
        return [
            2 * waves(self.batch, self.length, self.num_heads, 4, seed=seed) for seed in range(3)
        ]


def blocked(segment_lengths, rates, is_causal=False):
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

    def model(self, **options):
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

    def inputs(self):
        x = waves(2, self.num_tiles, 5)
        return x, (waves(2, self.num_tiles, 2, seed=1) + 1) * 10 * 256 * 0.999


SLIDES = {
    "aligned, pooled": Slide(2048, 93, True),
    "aligned, class token": Slide(2048, 93, False),
    "misaligned, pooled": Slide(1024, 60, True),  # segments of 1024, 362, 128, 45 and 16
}


class Encoder(NamedTuple):
    """One torchscale encoder of 2 layers of 16, which is given embeddings."""

    length: int
    options: dict[str, Any]

    def settings(self):
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

    def model(self, settings=None, **options):
        config = TorchscaleConfig.from_torchscale(settings or self.settings())
        return fill(LongNetEncoder(config, **options).double())

    def embeddings(self):
        return waves(2, self.length, 16)


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


def kept():
    from safetensors.torch import load_file

    return load_file(FILE)

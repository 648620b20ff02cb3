"""LongNetLM, torchscale's encoder and GigaPath's slide encoder, each imported when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .longnet import LongNetLM as LongNetLM
    from .longnet import NextTokenLoss as NextTokenLoss
    from .longnet_config import LongNetConfig as LongNetConfig
    from .longnet_vit import LongNetViT as LongNetViT
    from .longnet_vit import segment_lengths_for as segment_lengths_for
    from .names import map_names as map_names
    from .torchscale.architecture import TorchscaleConfig as TorchscaleConfig
    from .torchscale.gate import torchscale_attention as torchscale_attention
    from .torchscale.networks import LongNetEncoder as LongNetEncoder
    from .weights import load_slide_encoder as load_slide_encoder
    from .weights import read_weights as read_weights

_HOME = {
    "map_names": "names",
    "LongNetLM": "longnet",
    "NextTokenLoss": "longnet",
    "LongNetConfig": "longnet_config",
    "LongNetViT": "longnet_vit",
    "segment_lengths_for": "longnet_vit",
    "TorchscaleConfig": "torchscale.architecture",
    "torchscale_attention": "torchscale.gate",
    "LongNetEncoder": "torchscale.networks",
    "load_slide_encoder": "weights",
    "read_weights": "weights",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)

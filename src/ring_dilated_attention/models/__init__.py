"""Models built on dilated attention: LongNetLM, torchscale's LongNet, GigaPath's slide encoder.

Members are imported when they are first used (see the package).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checked_loading import map_names
    from .longnet import LongNetLM, NextTokenLoss
    from .longnet_config import LongNetConfig
    from .longnet_vit import LongNetViT, segment_lengths_for
    from .torchscale.architecture import TorchscaleConfig
    from .torchscale.gate import torchscale_attention
    from .torchscale.networks import LongNetDecoder, LongNetEncoder
    from .weights import load_slide_encoder, read_weights

__all__ = [
    "LongNetConfig",
    "LongNetDecoder",
    "LongNetEncoder",
    "LongNetLM",
    "LongNetViT",
    "NextTokenLoss",
    "TorchscaleConfig",
    "load_slide_encoder",
    "map_names",
    "read_weights",
    "segment_lengths_for",
    "torchscale_attention",
]

_HOME = {
    "LongNetConfig": "longnet_config",
    "LongNetDecoder": "torchscale.networks",
    "LongNetEncoder": "torchscale.networks",
    "LongNetLM": "longnet",
    "LongNetViT": "longnet_vit",
    "NextTokenLoss": "longnet",
    "TorchscaleConfig": "torchscale.architecture",
    "load_slide_encoder": "weights",
    "map_names": "checked_loading",
    "read_weights": "weights",
    "segment_lengths_for": "longnet_vit",
    "torchscale_attention": "torchscale.gate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)

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

_MEMBERS = {
    "names": ["map_names"],
    "longnet": ["LongNetLM", "NextTokenLoss"],
    "longnet_config": ["LongNetConfig"],
    "longnet_vit": ["LongNetViT", "segment_lengths_for"],
    "torchscale.architecture": ["TorchscaleConfig"],
    "torchscale.gate": ["torchscale_attention"],
    "torchscale.networks": ["LongNetEncoder"],
    "weights": ["load_slide_encoder", "read_weights"],
}
_HOME = {name: module for module, names in _MEMBERS.items() for name in names}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)

"""Hugging Face transformers: `attn_implementation="dilated"`, on one device or on ranks that share sequences."""

try:
    from .cache import BoundedCache
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: pip install 'ring-dilated-attention[hf]'") from error
from .convert import convert_to_dilated, register
from .parallel import context_parallel
from .trainer import SameSample

__all__ = ["BoundedCache", "SameSample", "context_parallel", "convert_to_dilated", "register"]

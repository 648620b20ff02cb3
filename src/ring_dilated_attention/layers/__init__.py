"""Modules built on `dilated_attention`."""

from .multihead import MultiheadDilatedAttention
from .rotary import RotaryTable, document_positions, rotary_table, rotate

__all__ = [
    "MultiheadDilatedAttention",
    "RotaryTable",
    "document_positions",
    "rotary_table",
    "rotate",
]

"""Modules built on `dilated_attention`."""

from .attribution import attention_weights, influence
from .multihead import MultiheadDilatedAttention
from .rotary import RotaryTable, document_positions, rotary_table, rotate

__all__ = [
    "MultiheadDilatedAttention",
    "RotaryTable",
    "attention_weights",
    "document_positions",
    "influence",
    "rotary_table",
    "rotate",
]

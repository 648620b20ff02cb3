"""Modules built on `dilated_attention`."""

from .checks import is_integral
from .multihead import MultiheadDilatedAttention
from .rotary import RotaryTable, document_positions, rotary_table, rotate

__all__ = ["MultiheadDilatedAttention", "RotaryTable", "document_positions", "is_integral", "rotary_table", "rotate"]

"""The call `dilated_attention`, its checks, and `explain`."""

from .attention import dilated_attention as dilated_attention
from .attention import save_attention as save_attention

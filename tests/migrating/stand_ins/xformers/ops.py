"""What dilated-attention-pytorch takes of xformers.ops, by torch's attention. Tensors are (B, N, H, D)."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class AttentionOp:
    pass


class LowerTriangularMask:
    pass


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    op: None = None,
    attn_bias: LowerTriangularMask | None = None,
) -> Tensor:
    rows = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(*rows, is_causal=attn_bias is not None).transpose(1, 2)

"""dilated-attention-pytorch 0.2.0: with is_causal=True the first output changes with the last token.

The cause: each head's output is divided by its sum over all positions. (torch's SDPA replaces xformers' operator here.)
"""

import sys
from types import SimpleNamespace as Module

import torch


def attention(query, key, value, op, attn_bias):
    is_causal = attn_bias is not None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return out.transpose(1, 2)


ops = Module(
    AttentionOp=None,
    LowerTriangularMask=object,
    memory_efficient_attention=attention,
)
sys.modules |= {"xformers": Module(ops=ops), "xformers.ops": ops}
from dilated_attention_pytorch.dilated_attention import DilatedAttention  # noqa: E402

generator = torch.Generator().manual_seed(0)
q, k, v = torch.rand(3, 1, 64, 2, 16, generator=generator)
attend = DilatedAttention([16, 64], [1, 4])
before = attend(q, k, v, is_causal=True)[:, 0]
v[:, -1] += 1
change = attend(q, k, v, is_causal=True)[:, 0] - before
moved = change.norm() / before.norm()
print(f"the first output moved by {moved:.1e} of itself, should be 0")

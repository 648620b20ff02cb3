"""torchscale at 4d1e0e8 on one device: the gradient of the queries is not the derivative of torchscale's forward.

The cause: `scattering` computes the weights of the branches under no_grad. They depend on q and k, and this part of the
gradient is lost.
"""

import torch
from torchscale_flash import attention

attend = attention(
    segment_lengths=[16, 64],
    dilated_ratio=[1, 4],
    num_heads=4,
    head_dim=16,
)
generator = torch.Generator().manual_seed(0)
q, k, v, d = torch.randn(4, 1, 64, 64, dtype=torch.float64, generator=generator)

q.requires_grad_()
attend(q, k, v).square().sum().backward()
slope = (q.grad * d).sum()

# the same slope by a small step to both sides
with torch.no_grad():
    above = attend(q + 1e-5 * d, k, v).square().sum()
    below = attend(q - 1e-5 * d, k, v).square().sum()
rise = (above - below) / 2e-5
print(f"derivative along a direction: {slope:.4f} by the gradient, should be {rise:.4f}")

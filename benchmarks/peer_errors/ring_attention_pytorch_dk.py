"""ring-attention-pytorch 0.5.20: the gradients of keys and values are mixed. Run by torchrun --nproc-per-node 2.

The cause: `ring_pass` returns the tensor that it received and the one that it sent. The backward takes these two for dk
and dv.
"""

import torch
import torch.distributed as dist
from ring_attention_pytorch import ring_flash_attn

dist.init_process_group("gloo")
mine = slice(32 * dist.get_rank(), 32 * dist.get_rank() + 32)
q, k, v = torch.randn(3, 1, 64, 1, 16, generator=torch.Generator().manual_seed(0))
keys, shard = k.clone().requires_grad_(), k[:, mine].clone().requires_grad_()
rows = (x.transpose(1, 2) for x in (q, keys, v))
torch.nn.functional.scaled_dot_product_attention(*rows).square().sum().backward()
ring_flash_attn(
    q[:, mine], shard, v[:, mine].requires_grad_(), ring_reduce_col=True
).square().sum().backward()
error = (shard.grad - keys.grad[:, mine]).norm() / keys.grad[:, mine].norm()
if dist.get_rank() == 0:
    print(f"on rank 0: relative error of dk {error:.1e}, should be below 1e-5")

"""ring-attention-pytorch 0.5.20: the gradients of keys and values are mixed. Run by torchrun --nproc-per-node 2.

The cause: `ring_pass` returns the tensor that it received and the one that it sent. The backward takes these two for dk
and dv.
"""

import torch
import torch.distributed as dist
from ring_attention_pytorch import ring_flash_attn

dist.init_process_group("gloo")
rank = dist.get_rank()
mine = slice(32 * rank, 32 * rank + 32)
generator = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 1, 64, 1, 16, generator=generator)

# the gradient of all keys on one device
keys = k.clone().requires_grad_()
rows = (x.transpose(1, 2) for x in (q, keys, v))
whole = torch.nn.functional.scaled_dot_product_attention(*rows)
whole.square().sum().backward()
expected = keys.grad[:, mine]

# that of this rank's keys, by the ring
shard = k[:, mine].clone().requires_grad_()
value = v[:, mine].requires_grad_()
out = ring_flash_attn(q[:, mine], shard, value, ring_reduce_col=True)
out.square().sum().backward()

error = (shard.grad - expected).norm() / expected.norm()
if rank == 0:
    print(f"on rank 0: relative error of dk {error:.1e}, should be below 1e-5")

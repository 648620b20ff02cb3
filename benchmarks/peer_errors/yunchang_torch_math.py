"""yunchang 0.6.4: with AttnType.TORCH_MATH the ring merges its chunks with wrong weights.

Run by torchrun --nproc-per-node 2. The cause: the weights come from the log-sum-exp of each chunk, and
`pytorch_attn_forward` returns zeros for it.
"""

import torch
import torch.distributed as dist
from yunchang import LongContextAttention, set_seq_parallel_pg
from yunchang.kernels import AttnType

dist.init_process_group("gloo")
rank = dist.get_rank()
set_seq_parallel_pg(1, 2, rank, 2)
mine = slice(32 * rank, 32 * rank + 32)
generator = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 1, 64, 1, 16, generator=generator)

rows = (x.transpose(1, 2) for x in (q, k, v))
out = torch.nn.functional.scaled_dot_product_attention(*rows)
whole = out.transpose(1, 2)[:, mine]

ring = LongContextAttention(ring_impl_type="basic", attn_type=AttnType.TORCH_MATH)
shard = ring(q[:, mine], k[:, mine], v[:, mine])
error = (shard - whole).norm() / whole.norm()
if rank == 0:
    print(f"on rank 0: relative error of out {error:.1e}, should be below 1e-5")

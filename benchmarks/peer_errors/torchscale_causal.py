"""torchscale at 4d1e0e8: over two ranks, causal attention leaves out the keys of a rank's own shard.

Run by torchrun --nproc-per-node 2. The cause: `gather_kv` keeps only the keys of earlier ranks. Rank 0 has no earlier
rank, and gets zeros.
"""

import torch
import torch.distributed as dist
from torchscale_flash import attention

dist.init_process_group("gloo")
rank = dist.get_rank()
mine = slice(32 * rank, 32 * rank + 32)
generator = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 1, 64, 64, generator=generator)
arguments = {
    "segment_lengths": [16, 64],
    "dilated_ratio": [1, 4],
    "num_heads": 4,
    "head_dim": 16,
}
on_one_device = attention(**arguments)
over_ranks = attention(**arguments, seq_parallel=True)
whole = on_one_device(q, k, v, is_causal=True)[:, mine]
shard = over_ranks(q[:, mine], k[:, mine], v[:, mine], is_causal=True)
error = (shard - whole).norm() / whole.norm()
if rank == 0:
    print(f"on rank 0: relative difference to one device {error:.1e}, should be below 1e-5")

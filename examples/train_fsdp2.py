"""FSDP2 on a data x sequence mesh: two replicas, each a sequence that two ranks share; parameters sharded, clipped.

torchrun --nproc-per-node 4 examples/train_fsdp2.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.integrations.torch import check_averaged
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
replicas = 2 if dist.get_world_size() % 2 == 0 else 1
mesh = init_device_mesh(device, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("dp", "cp"))
parallel = ContextParallel(mesh["cp"])
torch.manual_seed(0)  # the same parameters on every rank
config = LongNetConfig((64, 256), (1, 4), embed_dim=64, num_layers=2, num_heads=4)
model = NextTokenLoss(LongNetLM(config, parallel=parallel)).to(device)  # FSDP2 hooks the forward, so the loss is one
for block in model.model.blocks:
    fully_shard(block, mesh=mesh)  # replicates over dp, shards over cp, averages over both
fully_shard(model, mesh=mesh)
check_averaged(model, parallel)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

generator = torch.Generator().manual_seed(1 + mesh.get_local_rank("dp"))  # a replica's ranks draw the same sample
for step in range(20):
    start = torch.randint(0, 256, (1,), generator=generator)
    batch = parallel.shard_batch({"tokens": (start + torch.arange(512)[None] * 7) % 256})  # checked to be the same
    loss = model(batch["tokens"].to(device))  # the mean of this replica's sequence, on both its ranks
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.4f}, norm of the gradient {norm.item():.4f}")
dist.destroy_process_group()

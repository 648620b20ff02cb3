"""Lightning Fabric on a data x sequence mesh: parameters sharded over all ranks, each sequence shared by two.

torchrun --nproc-per-node 4 examples/train_fabric.py
"""

import os

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from ring_dilated_attention.integrations.torch import ShardSequence
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss

shared_by = 2
processes = int(os.environ.get("WORLD_SIZE", 1))
style = ShardSequence()


def parallelize(model, mesh):
    parallelize_module(model, mesh["tensor_parallel"], style)  # Lightning's name for the second axis
    return fully_shard(model, mesh=mesh["data_parallel", "tensor_parallel"]._flatten("all"))


strategy = ModelParallelStrategy(parallelize, data_parallel_size=processes // shared_by, tensor_parallel_size=shared_by)
fabric = lightning.Fabric(accelerator="auto", devices=processes, strategy=strategy)
fabric.launch()
torch.manual_seed(0)  # the same parameters on every rank
config = LongNetConfig((64, 256), (1, 4), embed_dim=64, num_layers=2, num_heads=4)
model = fabric.setup_module(NextTokenLoss(LongNetLM(config)))
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))

[parallel] = style.contexts.values()
generator = torch.Generator().manual_seed(1 + fabric.global_rank // shared_by)  # a replica's ranks draw one sample
for step in range(20):
    start = torch.randint(0, 256, (1,), generator=generator)
    batch = parallel.shard_batch({"tokens": (start + torch.arange(512)[None] * 7) % 256})  # checked to be the same
    loss = model(batch["tokens"].to(fabric.device))
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad()
    if fabric.global_rank == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.4f}")

"""FSDP2 on a data x sequence mesh, with parameters sharded and clipped.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py

There are two replicas, each a sequence that two ranks share. The norm of the
first gradient is compared with that of one rank, which reads the samples of all
replicas.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.integrations.torch import check_averaged
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seq-len", type=int, default=512, help="positions of a sequence (default %(default)s)")
parser.add_argument("--steps", type=int, default=20, help="training steps (default %(default)s)")
options = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
config = LongNetConfig((64, 256), (1, 4), embed_dim=64, num_layers=2, num_heads=4)


def make_loss(parallel: ContextParallel | None) -> NextTokenLoss:
    torch.manual_seed(0)  # the same parameters on every rank
    return NextTokenLoss(LongNetLM(config, parallel=parallel)).to(device)  # FSDP2 hooks the forward: the loss is one


def samples(replica: int) -> Iterator[torch.Tensor]:
    """The same on all ranks of a replica. Replicas draw different ones."""
    generator = torch.Generator().manual_seed(1 + replica)
    while True:
        start = torch.randint(0, 256, (1,), generator=generator)
        yield (start + torch.arange(options.seq_len)[None] * 7) % 256


dist.init_process_group()
replicas = 2 if dist.get_world_size() % 2 == 0 else 1
mesh = init_device_mesh(device, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("dp", "cp"))
one_rank = make_loss(None)
sum(one_rank(next(samples(replica)).to(device)) / replicas for replica in range(replicas)).backward()
expected = torch.nn.utils.get_total_norm([x.grad for x in one_rank.parameters()])

parallel = ContextParallel(mesh["cp"])
model = make_loss(parallel)
for block in model.model.blocks:
    fully_shard(block, mesh=mesh)  # replicates over dp, shards over cp, averages over both
fully_shard(model, mesh=mesh)
check_averaged(model, parallel)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step, tokens in zip(range(1, options.steps + 1), samples(mesh.get_local_rank("dp")), strict=False):
    batch = parallel.shard_batch({"tokens": tokens})  # checked to be the same on the replica's ranks
    loss = model(batch["tokens"].to(device))  # the mean of this replica's sequence, on both its ranks
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step == 1:
        print(f"norm of the first gradient {norm.item():.5f}; on one rank {expected.item():.5f}")
    if dist.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4f}, norm of the gradient {norm.item():.4f}")
dist.destroy_process_group()

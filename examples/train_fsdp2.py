"""FSDP2 on a data x sequence mesh, with parameters sharded and clipped.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py
    torchrun --nproc-per-node 4 examples/train_fsdp2.py --checkpoints DIR
    torchrun --nproc-per-node 3 examples/train_fsdp2.py --checkpoints DIR

There are two replicas, each a sequence that two ranks share. A rank makes the
model block by block, and keeps its part: half of it, of a replica of two ranks.
Before a new run the first rank has a whole one for a moment, to compare the
norm of the first gradient. Leave that out of a model that does not fit.

With --checkpoints each rank writes its part of parameters and AdamW's state, as
safetensors. The next run goes on from there, with any number of ranks. Hosts
that do not share the folder are refused.
"""

import argparse
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.integrations.torch import check_averaged
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seq-len", type=int, default=512, help="positions of a sequence (default %(default)s)")
parser.add_argument("--steps", type=int, default=20, help="training steps (default %(default)s)")
parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="go on from the newest here, and write one more")
options = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
config = LongNetConfig((64, 256), (1, 4), embed_dim=64, num_layers=2, num_heads=4)


def sharded_loss(parallel: ContextParallel, mesh: DeviceMesh) -> NextTokenLoss:
    torch.manual_seed(0)  # the same parameters on every rank
    with torch.device("meta"):
        loss = NextTokenLoss(LongNetLM(config, parallel=parallel))  # FSDP2 hooks the forward: the loss is one
    for end in (loss.model.embedding, loss.model.head, loss.model.final_layernorm):
        end.to_empty(device=device)
    loss.model.reset_ends()
    for block in loss.model.blocks:
        loss.model.reset_block(block.to_empty(device=device))
        fully_shard(block, mesh=mesh)  # replicates over dp, shards over cp, averages over both
    return fully_shard(loss, mesh=mesh)


def norm_on_one_rank() -> float:
    """The norm of the first gradient of a whole model, which reads the samples of all replicas."""
    loss = NextTokenLoss(LongNetLM(config)).to(device)
    torch.manual_seed(0)
    loss.model.reset_parameters()
    sum(loss(next(samples(replica)).to(device)) / replicas for replica in range(replicas)).backward()
    return torch.nn.utils.get_total_norm([x.grad for x in loss.parameters()]).item()


def check_shared(folder: Path) -> None:
    """End all ranks unless each sees the file that the first one makes in the folder."""
    with ExitStack() as stack:  # at whose end the file goes
        names = [""]
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            names = [stack.enter_context(NamedTemporaryFile(dir=folder)).name]
        dist.broadcast_object_list(names)
        seen = torch.tensor(Path(names[0]).exists(), dtype=torch.int32, device=device)
        dist.all_reduce(seen, dist.ReduceOp.MIN)
    if not seen:
        raise SystemExit(f"{folder} is not on a file system that all hosts share")


def samples(replica: int) -> Iterator[torch.Tensor]:
    """The same on all ranks of a replica. Replicas draw different ones."""
    generator = torch.Generator().manual_seed(1 + replica)
    while True:
        start = torch.randint(0, 256, (1,), generator=generator)
        yield (start + torch.arange(options.seq_len)[None] * 7) % 256


def tensors() -> dict[str, torch.Tensor]:
    """Parameters by name, and AdamW's state as "<field>/<name>"; of each this rank's part."""
    found = dict(model.named_parameters())
    for name, parameter in list(found.items()):
        found |= {f"{field}/{name}": x for field, x in optimizer.state[parameter].items()}
    return found


def load(folder: Path) -> int:
    """Read this rank's parts. Returns the number of steps that were taken."""
    for x in model.parameters():
        zeros = {field: torch.zeros_like(x) for field in ("exp_avg", "exp_avg_sq")}
        optimizer.state[x] = {"step": torch.zeros(()), **zeros}
    try:
        dcp.load(tensors(), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except dcp.CheckpointException as error:  # on all ranks
        raise SystemExit(f"{folder} does not fit this model: {next(iter(error.failures.values()))[0]}") from None
    return int(next(iter(optimizer.state.values()))["step"])


def save(folder: Path) -> None:
    """Each rank writes and flushes its part. Then the first rank gives the folder its name."""
    unfinished = folder.with_name(f"unfinished-{folder.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a job that was killed
    dist.barrier()
    dcp.save(tensors(), storage_writer=dcp.HuggingFaceStorageWriter(str(unfinished), save_distributed=True))
    if dist.get_rank() == 0:
        flush(unfinished)
        unfinished.rename(folder)
        flush(folder.parent)
        print(f"wrote {folder}")


def flush(folder: Path) -> None:
    """Let the names in a folder be on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


if sys.platform == "linux":  # a rank ends with its torchrun, and does not train on alone
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
dist.init_process_group()
replicas = 2 if dist.get_world_size() % 2 == 0 else 1
mesh = init_device_mesh(device, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("dp", "cp"))
if options.checkpoints:
    check_shared(options.checkpoints)
newest = max(options.checkpoints.glob("step-*"), default=None) if options.checkpoints else None
expected = norm_on_one_rank() if dist.get_rank() == 0 and newest is None else None
parallel = ContextParallel(mesh["cp"])
model = sharded_loss(parallel, mesh)
check_averaged(model, parallel)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
done = load(newest) if newest else 0
batches = islice(samples(mesh.get_local_rank("dp")), done, done + options.steps)
for step, tokens in enumerate(batches, start=done + 1):
    batch = parallel.shard_batch({"tokens": tokens})  # checked to be the same on the replica's ranks
    loss = model(batch["tokens"].to(device))  # the mean of this replica's sequence, on both its ranks
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step == 1:
        print(f"norm of the first gradient {norm.item():.5f}; on one rank {expected:.5f}")
    if dist.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4f}, norm of the gradient {norm.item():.4f}")
if options.checkpoints:
    save(options.checkpoints / f"step-{done + options.steps:06d}")
dist.destroy_process_group()

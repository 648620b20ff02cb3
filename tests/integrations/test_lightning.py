"""Lightning's Trainer and Fabric on sequences that ranks share, against one rank.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import lightning
import pytest
import torch
from distributed import run
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import ModelParallelStrategy
from steps import (
    MAX_NORM,
    PER_STEP,
    SAMPLES,
    Steps,
    assert_same,
    environment,
    make_loss,
    optimizer_of,
    take_steps,
    whole,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from ring_dilated_attention import ContextParallel


class Module(lightning.LightningModule):
    """Under DDP, or with parameters sharded over the ranks of all sequences."""

    def __init__(self, sharded):
        super().__init__()
        self.sharded, self.losses, self.norms = sharded, [], []

    def configure_model(self):
        mesh = self.device_mesh["tensor_parallel"] if self.sharded else None
        self.parallel = ContextParallel(mesh, sharding="contiguous" if self.sharded else "zigzag")
        self.loss_of = make_loss(self.parallel)
        if self.sharded:
            fully_shard(
                self.loss_of,
                mesh=self.device_mesh["data_parallel", "tensor_parallel"]._flatten("all"),
            )

    def training_step(self, tokens, index):
        loss = self.loss_of(self.parallel.shard_batch({"tokens": tokens})["tokens"])
        self.losses.append(loss.item())
        return loss

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        norm = torch.nn.utils.clip_grad_norm_(self.loss_of.parameters(), gradient_clip_val)
        self.norms.append(float(whole(norm)))

    def configure_optimizers(self):
        return optimizer_of(self)


# beside what torchrun sets for each
OF_TORCHRUN = {"LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0}


def rank_of_trainer(rank, world_size, sharded):
    environment(rank, world_size, **OF_TORCHRUN)
    strategy = "ddp"
    if sharded:
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=world_size)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=MAX_NORM,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(sharded)
    trainer.fit(module, DataLoader(SAMPLES, batch_size=PER_STEP))
    parameters = {name: whole(x.detach()) for name, x in module.loss_of.named_parameters()}
    assert_same(Steps(module.losses, module.norms, parameters))


@pytest.mark.parametrize("sharded", [False, True])
def test_trainer(sharded):
    """Under DDP, and with parameters sharded over the ranks of a sequence; clipped."""
    run(2, rank_of_trainer, sharded, seconds=120)


def rank_of_fabric(rank, world_size):
    """Two replicas of sequences that two ranks share each; parameters are sharded over all four."""
    environment(rank, world_size, **OF_TORCHRUN)
    made = []

    def parallelize(model, mesh):
        made.append(ContextParallel(mesh["tensor_parallel"]))
        for module in model.modules():
            if hasattr(module, "parallel"):
                module.parallel = made[0]
        fully_shard(model, mesh=mesh["data_parallel", "tensor_parallel"]._flatten("all"))
        return model

    strategy = FabricModelParallel(
        parallelize_fn=parallelize, data_parallel_size=2, tensor_parallel_size=2
    )
    fabric = lightning.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(make_loss())
    [parallel] = made
    optimizer = fabric.setup_optimizers(optimizer_of(model))
    replica = fabric.strategy.device_mesh.get_local_rank("data_parallel")
    batches = (batch[replica : replica + 1] for batch in SAMPLES.split(PER_STEP))
    found = take_steps(
        model, optimizer, lambda batch: model(parallel.shard(batch)), fabric.backward, batches
    )
    losses = [fabric.all_reduce(torch.tensor(loss)).item() for loss in found.losses]
    parameters = {name.rpartition("module.")[2]: x for name, x in found.parameters.items()}
    assert_same(Steps(losses, found.norms, parameters))


def test_fabric():
    run(4, rank_of_fabric, seconds=120)

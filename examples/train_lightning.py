"""Lightning's Trainer on sequences that two ranks share.

torchrun --nproc-per-node 2 examples/train_lightning.py
"""

import os

import lightning
import torch
from torch.utils.data import DataLoader

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss


class Module(lightning.LightningModule):
    def configure_model(self):  # on every rank, once torch.distributed is initialised
        self.parallel = ContextParallel()
        torch.manual_seed(0)
        config = LongNetConfig((64, 256), (1, 4), embed_dim=64, num_layers=2, num_heads=4)
        self.loss_of = NextTokenLoss(LongNetLM(config, parallel=self.parallel))

    def training_step(self, tokens, index):
        local = self.parallel.shard_batch({"tokens": tokens})  # refuses different samples for one sequence
        loss = self.loss_of(local["tokens"])
        if self.global_rank == 0 and index % 5 == 4:
            print(f"step {index + 1}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


samples = (torch.arange(20)[:, None] * 37 + torch.arange(512) * 7) % 256
trainer = lightning.Trainer(
    accelerator="auto", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp", max_epochs=1,
    gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    use_distributed_sampler=False,  # the default gives the ranks of a sequence different samples
)  # fmt: skip
trainer.fit(Module(), DataLoader(samples, batch_size=1))

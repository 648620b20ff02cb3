"""accelerate on sequences that two ranks share. The loader is not prepared: accelerate would deal different samples.

torchrun --nproc-per-node 2 examples/train_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss

accelerator = Accelerator(cpu=not torch.cuda.is_available())
parallel = ContextParallel()
torch.manual_seed(0)
config = LongNetConfig((64, 256), (1, 4), embed_dim=64, num_layers=2, num_heads=4)
model = NextTokenLoss(LongNetLM(config, parallel=parallel))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))

samples = (torch.arange(20)[:, None] * 37 + torch.arange(512) * 7) % 256
for step, tokens in enumerate(DataLoader(samples, batch_size=1)):
    local = parallel.shard_batch({"tokens": tokens})  # refuses different samples for one sequence
    loss = model(local["tokens"].to(accelerator.device))
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.4f}")
accelerator.end_training()

"""DeepSpeed ZeRO-3 on sequences that two ranks share. No mpu: to DeepSpeed the ranks of a sequence are replicas.

torchrun --nproc-per-node 2 examples/train_deepspeed.py
"""

import deepspeed
import torch
import torch.distributed as dist

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss

config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,  # torch's AdamW; without "optimizer" DeepSpeed compiles none of its own
}
deepspeed.init_distributed()
parallel = ContextParallel()
torch.manual_seed(0)  # the same parameters on every rank
longnet = LongNetConfig((64, 256), (1, 4), embed_dim=64, num_layers=2, num_heads=4)
model = NextTokenLoss(LongNetLM(longnet, parallel=parallel))  # the loss is a forward: the mean of gradients is right
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), config=config)

generator = torch.Generator().manual_seed(1)  # both ranks draw the same sample
for step in range(20):
    start = torch.randint(0, 256, (1,), generator=generator)
    batch = parallel.shard_batch({"tokens": (start + torch.arange(512)[None] * 7) % 256})  # checked to be the same
    loss = engine(batch["tokens"].to(engine.device))
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.4f}")
dist.destroy_process_group()

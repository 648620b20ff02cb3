"""A Llama learns sequences of 16,384 bytes, of which two ranks hold half each, and writes on from a bounded cache.

torchrun --nproc-per-node 2 examples/train_hugging_face_long.py
"""

import argparse
import inspect
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.integrations.transformers import BoundedCache, context_parallel, register

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seq-len", type=int, default=16_384, help="bytes of a sequence (default %(default)s)")
parser.add_argument("--steps", type=int, default=30, help="training steps (default %(default)s)")
options = parser.parse_args()
register()
dist.init_process_group()
length = options.seq_len
pattern = {"segment_lengths": [256, length], "dilation_rates": [1, 64]}
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
sizes |= {"max_position_embeddings": 2 * length}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, dilated_attention=pattern)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config)
pages = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
text = torch.tensor(list(b"".join(page.read_bytes() for page in pages)))

sharded = context_parallel(model, ContextParallel(sharding="zigzag"))
replicas = DistributedDataParallel(model)  # takes the mean of both ranks' gradients
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(1, options.steps + 1):
    start = int(torch.randint(len(text) - length, ()))  # the same on both ranks, as their seed is
    ids = text[None, start : start + length]  # whole on both: the model cuts it
    loss = replicas(input_ids=ids, labels=ids).loss  # logits of 4,096 positions at a time
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and (step == 1 or step % 5 == 0):
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
sharded.remove()  # whole sequences again, for generation
if dist.get_rank() == 0:
    cache, prompt = BoundedCache(model), text[None, :length]
    is_new = "cache" in inspect.signature(model.forward).parameters
    named = {"cache" if is_new else "past_key_values": cache}  # the name is `cache` since transformers 5.24
    written = model.generate(prompt, **named, max_new_tokens=40, do_sample=False, pad_token_id=0)
    print(bytes(written[0, length:].tolist()))
    rows = written.shape[1] * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    print(f"the cache holds {cache.num_bytes:,} bytes at any length; {4 * rows:,} without a bound")
dist.destroy_process_group()

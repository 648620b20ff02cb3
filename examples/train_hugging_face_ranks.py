"""The same model on sequences that two ranks share, under transformers' Trainer.

torchrun --nproc-per-node 2 examples/train_hugging_face_ranks.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.integrations.transformers import SameSample, context_parallel, register


class SequenceTrainer(SameSample, Trainer):
    """Gives the ranks that share a sequence the same sample."""


register()
arguments = TrainingArguments(  # initialises torch.distributed
    use_cpu=not torch.cuda.is_available(), max_steps=60, learning_rate=5e-3, logging_steps=20, report_to=[],
    per_device_train_batch_size=2, save_strategy="no", ddp_find_unused_parameters=False,  # True lets DDP warn
)  # fmt: skip
pattern = {"segment_lengths": [64, 256], "dilation_rates": [1, 4]}
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, dilated_attention=pattern)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config)
text = (Path(__file__).parent.parent / "README.md").read_bytes()
samples = torch.tensor(list(text)).unfold(0, 512, 256)  # (samples, 512) bytes, whole on every rank

sharded = context_parallel(model, ContextParallel(sharding="zigzag"))
SequenceTrainer(model=model, args=arguments, train_dataset=[{"input_ids": x, "labels": x} for x in samples]).train()
sharded.remove()  # whole sequences again, for generation
if dist.get_rank() == 0:
    prompt = torch.tensor([list(b"Exact dilated attention ")], device=model.device)
    written = model.generate(prompt, max_new_tokens=60, do_sample=False, pad_token_id=0)
    print(bytes(written[0].tolist()))
dist.destroy_process_group()

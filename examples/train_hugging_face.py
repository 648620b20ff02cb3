"""A small Llama with dilated attention learns this repository's README, is saved, loaded, and writes on.

python examples/train_hugging_face.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from ring_dilated_attention.integrations.transformers import register

register()
pattern = {"segment_lengths": [64, 256], "dilation_rates": [1, 4]}
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, dilated_attention=pattern)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config)

text = (Path(__file__).parent.parent / "README.md").read_bytes()
samples = torch.tensor(list(text)).unfold(0, 512, 256)  # (samples, 512) bytes

with TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,
        max_steps=60,
        learning_rate=5e-3,
        logging_steps=20,
        report_to=[],
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": x, "labels": x} for x in samples])
    trainer.train()
    trainer.save_model(folder)  # the pattern and the name of the attention stand in its config.json
    model = AutoModelForCausalLM.from_pretrained(folder)
prompt = torch.tensor([list(b"Exact dilated attention ")])
written = model.generate(prompt, max_new_tokens=60, do_sample=False, pad_token_id=0)
print(bytes(written[0].tolist()))

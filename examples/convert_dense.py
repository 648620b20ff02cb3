"""What happens to the loss of a dense model that becomes dilated: it rises, and further training brings it down again.

python examples/convert_dense.py
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.integrations.transformers import convert_to_dilated

sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=4))
follows = torch.randperm(32)


def sample(batch):
    """Each token tells the one that comes 9 positions later."""
    columns = [torch.randint(32, (batch, 9))]
    for _ in range(14):
        columns.append(follows[columns[-1]])
    return torch.cat(columns, dim=1)[:, :128]


def train(num_steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        ids = sample(8)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def report(moment):
    ids = sample(64)
    print(f"{moment}: {model(input_ids=ids, labels=ids).loss.item():.3f}", flush=True)


for _ in range(2):
    train(100)
    report("dense")
convert_to_dilated(model, DilatedPattern((32, 128), (1, 2)))
report("dilated, as it is")
for _ in range(2):
    train(100)
    report("dilated, trained further")

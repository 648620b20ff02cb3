"""torch's nn.TransformerEncoder made long: its attention is replaced.

    python examples/encoder.py

Parameters and calls stay. First it shows that under a dense pattern the encoder
is torch's. Then the encoder learns to say at every position which class the
sequence has. Only the first 128 positions tell it. A query sees at most 128
keys of the short branch and 128 of the long one: the long branch must carry the
class, and the short one must spread it. At last the same parameters run without
the long branch.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.integrations.torch import replace_attention

NUM_CLASSES = 4


class Tagger(nn.Module):
    """An embedding, torch's encoder, and a class for each position."""

    def __init__(self, vocab_size: int, embed_dim: int, num_layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            embed_dim, 4, 2 * embed_dim, dropout=0.0, batch_first=True, norm_first=True
        )  # dilated attention has no dropout and is batch first
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(embed_dim, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N) to (B, N, classes)."""
        return self.head(self.encoder(self.embedding(tokens)))


def sample(batch: int, seq_len: int, vocab_size: int, short: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, N), of which the first `short` tell the class, and the labels (B, N)."""
    tokens = torch.randint(NUM_CLASSES, vocab_size, (batch, seq_len))
    tokens[:, :short] = torch.arange(batch)[:, None] % NUM_CLASSES
    return tokens, tokens[:, :1].expand(-1, seq_len)


@torch.no_grad()
def accuracy(model: Tagger, tokens: Tensor, labels: Tensor) -> float:
    return (model(tokens).argmax(-1) == labels).double().mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=4096, help="positions (default %(default)s)")
    parser.add_argument("--embed-dim", type=int, default=32, help="width (default %(default)s)")
    parser.add_argument("--steps", type=int, default=80, help="training steps (default %(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    short, vocab_size = min(128, options.seq_len), 16
    model = Tagger(vocab_size, options.embed_dim, num_layers=2)

    tokens, labels = sample(4, min(512, options.seq_len), vocab_size, short)
    theirs = model(tokens)
    replace_attention(model, DilatedPattern.dense())  # keeps the parameters: checkpoints and optimizers still fit
    difference = (model(tokens) - theirs).abs().max().item()
    print(f"torch's encoder and ours under a dense pattern differ by at most {difference:.0e}")

    rate = options.seq_len // short
    replace_attention(model, DilatedPattern((short, options.seq_len), (1, rate)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, options.steps + 1):
        tokens, labels = sample(4, options.seq_len, vocab_size, short)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, options.steps // 6) == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    tokens, labels = sample(4, options.seq_len, vocab_size, short)
    right = accuracy(model, tokens, labels)
    replace_attention(model, DilatedPattern((short,), (1,)))
    alone = accuracy(model, tokens, labels)
    print(f"both branches: right at {right:.1%} of {options.seq_len:,} positions; a guess at {1 / NUM_CLASSES:.0%}")
    print(f"the short branch alone: {alone:.1%}; it shows the class to {short / options.seq_len:.1%} of the positions")


if __name__ == "__main__":
    main()

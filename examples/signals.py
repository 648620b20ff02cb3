"""An encoder of recordings: windows are to be labelled by what came long before.

    python examples/signals.py                 writes signals.png here

Each recording is noise with one short burst in its first third, at one of two
frequencies. Every window of the last third is to say which. The recordings have
different lengths, and are padded. The model is torch's nn.TransformerEncoder
with a pattern: a sliding window, and the whole recording at a rate of 4. Then
the same is trained with the window alone, which shows nothing of the burst. At
last a picture shows which samples moved the labels: those of the burst.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.integrations.torch import replace_attention
from ring_dilated_attention.layers import influence
from ring_dilated_attention.pictures import draw_influence

PATCH = 64  # samples that become one position
BURST = 12 * PATCH
PERIODS = (16, 6)  # of a burst, in samples


class Recordings:
    """Samples, padding and bursts (B, N); labels (B,), and the windows (B, N / PATCH) that are to be labelled."""

    def __init__(self, batch: int, num_samples: int) -> None:
        lengths = torch.randint(num_samples // 2, num_samples + 1, (batch,)) // PATCH * PATCH
        places = torch.arange(num_samples)
        starts = (torch.rand(batch) * (lengths / 3 - BURST)).long()
        self.padding = places >= lengths[:, None]
        self.in_burst = (places >= starts[:, None]) & (places < starts[:, None] + BURST)
        self.labels = torch.randint(2, (batch,))
        self.asked = ((places >= lengths[:, None] * 2 // 3) & ~self.padding)[:, ::PATCH]
        periods = torch.tensor(PERIODS)[self.labels]
        waves = torch.sin(2 * torch.pi * (places / periods[:, None] + torch.rand(batch, 1)))
        samples = torch.randn(batch, num_samples) + 2 * waves * self.in_burst
        self.samples = samples.masked_fill(self.padding, 0)


class Encoder(nn.Module):
    """Patches of samples, torch's encoder with a pattern, and a label for each window of PATCH samples."""

    def __init__(self, pattern: DilatedPattern, embed_dim: int, num_layers: int = 2) -> None:
        super().__init__()
        filters = nn.Conv1d(1, embed_dim, 32, stride=8, padding=12), nn.GELU(), nn.AvgPool1d(PATCH // 8)
        self.patches = nn.Sequential(*filters, nn.Conv1d(embed_dim, embed_dim, 1))
        layer = nn.TransformerEncoderLayer(embed_dim, 4, 2 * embed_dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(embed_dim), enable_nested_tensor=False)
        replace_attention(self.encoder, pattern, rotary=True)
        self.head = nn.Linear(embed_dim, 2)

    def forward(self, samples: Tensor, padding: Tensor) -> Tensor:
        """(B, N) to (B, N / PATCH, 2)."""
        windows = self.patches(samples[:, None]).mT
        return self.head(self.encoder(windows, src_key_padding_mask=padding[:, ::PATCH]))


def train(pattern: DilatedPattern, options: argparse.Namespace) -> Encoder:
    torch.manual_seed(0)
    model = Encoder(pattern, options.embed_dim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        batch = Recordings(options.batch, options.samples)
        labels = batch.labels[:, None].expand_as(batch.asked)[batch.asked]
        loss = nn.functional.cross_entropy(model(batch.samples, batch.padding)[batch.asked], labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, options.steps // 6) == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model.eval()


@torch.no_grad()
def accuracy(model: Encoder, batch: Recordings) -> float:
    """The share of windows with the right label, among those of the last third of each recording."""
    is_right = model(batch.samples, batch.padding).argmax(2) == batch.labels[:, None]
    return is_right[batch.asked].double().mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16_384, help="of the longest recording (default %(default)s)")
    parser.add_argument("--embed-dim", type=int, default=32, help="width (default %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="recordings of a step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="training steps (default %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("signals.png"), help="file (default %(default)s)")
    options = parser.parse_args(argv)
    num_positions = options.samples // PATCH
    window = DilatedPattern.sliding(16)
    dilated = DilatedPattern((num_positions,), (4,), window=16)

    print(f"{options.samples:,} samples are {num_positions} positions. Training with both branches")
    model = train(dilated, options)
    print("training with the window alone")
    near = train(window, options)
    held_out = Recordings(4 * options.batch, options.samples)
    print(f"both branches: {accuracy(model, held_out):.1%} of windows are right; a guess has 50%")
    print(f"the window alone: {accuracy(near, held_out):.1%}")

    def difference(samples: Tensor) -> Tensor:
        """Of the two labels' logits, over the windows that are to be labelled: one number for each recording."""
        return (model(samples, held_out.padding).diff(dim=2)[..., 0] * held_out.asked).sum(1)

    moved = influence(difference, held_out.samples)
    share = moved.abs()[held_out.in_burst].sum() / moved.abs().sum()
    part = held_out.in_burst.sum() / (~held_out.padding).sum()
    print(f"influence: {share:.0%} of it is in the bursts, which are {part:.1%} of the samples")
    length = int((~held_out.padding[0]).sum())
    figure = draw_influence(moved[0, :length], held_out.samples[0, :length])
    figure.savefig(options.picture, dpi=120)
    print(f"wrote {options.picture}: one recording, and the influence of its samples on the labels of its last third")


if __name__ == "__main__":
    main()

"""An encoder over the tokens of a video: a step on an hour, planned first.

    python examples/video.py                   an hour at a frame a second:
                                               3,600 x 256 = 921,600 tokens
    python examples/video.py --frames 600      ten minutes

A clip of a tenth of the length is run first, and its speed is given to `rda
plan model`, which says what the whole step will hold and take. Then a forward
and its backward run. The tokens are made up; those of your tokenizer take their
place. Hidden tokens are to be guessed, from frames before and after them (the
attention is not causal).
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ring_dilated_attention.models import LongNetEncoder, TorchscaleConfig

CODES, HIDDEN = 1024, 1024  # the tokenizer's codes are 0 to 1,023; the token 1,024 hides one


def branches(frames: int, patches: int) -> tuple[list[int], list[int]]:
    """Segments of 1, 16, 256 frames and of the whole video. Each has about as many rows as a frame has patches."""
    lengths = [patches * scale for scale in (1, 16, 256) if scale < frames] + [patches * frames]
    return lengths, [length // patches for length in lengths]


def make_video(frames: int, patches: int) -> Tensor:
    """(1, frames x patches) tokens: a patch keeps its token for some frames, so that it can be guessed from others."""
    scenes = torch.randint(CODES, (frames // 8 + 1, patches))
    return scenes.repeat_interleave(8, dim=0)[:frames].reshape(1, -1)


class HiddenTokenLoss(nn.Module):
    """The cross-entropy of hidden tokens, one in 64. Logits are made for these alone."""

    def __init__(self, frames: int, patches: int, embed_dim: int) -> None:
        super().__init__()
        config = TorchscaleConfig(
            *branches(frames, patches), num_layers=2, embed_dim=embed_dim, num_heads=4, ffn_dim=2 * embed_dim,
            padding="exact",
        )  # fmt: skip
        self.tokens = nn.Embedding(CODES + 1, embed_dim)
        self.encoder = LongNetEncoder(config, activation_checkpointing=True)
        self.patches = nn.Parameter(torch.randn(patches, embed_dim) * 0.02)
        self.head = nn.Linear(embed_dim, CODES)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """tokens: (1, frames x patches). hidden: the positions to guess."""
        x = self.tokens(tokens.index_fill(1, hidden, HIDDEN))
        x = x + self.patches.repeat(tokens.shape[1] // len(self.patches), 1)  # where in its frame a token stands
        states = self.encoder(x)
        return nn.functional.cross_entropy(self.head(states[0, hidden]), tokens[0, hidden])


def step(frames: int, patches: int, embed_dim: int) -> tuple[float, float]:
    """The loss and the seconds of a forward and its backward."""
    torch.manual_seed(0)
    model, tokens = HiddenTokenLoss(frames, patches, embed_dim), make_video(frames, patches)
    hidden = torch.arange(0, tokens.shape[1], 64) + torch.randint(64, (tokens.shape[1] // 64,))
    start = time.perf_counter()
    loss = model(tokens, hidden)
    loss.backward()
    return loss.item(), time.perf_counter() - start


def plan(frames: int, patches: int, embed_dim: int, flops: float) -> dict:
    """What `rda plan model` says of this encoder with checkpointed activations. flops: operations per second."""
    lengths, rates = branches(frames, patches)
    sizes = {"layers": 2, "embed-dim": embed_dim, "heads": 4, "ffn-dim": 2 * embed_dim, "vocab": CODES}
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    options += ["--seq-len", str(frames * patches), "--activations", "checkpointed", "--not-causal", "--json"]
    options += ["--segment-lengths", *map(str, lengths), "--dilation-rates", *map(str, rates)]
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "here.toml"
        here.write_text(f"[hardware]\nflops_per_second = {flops}\nbytes_per_second = 1e9\nmemory_bytes = 1e12\n")
        command = [sys.executable, "-m", "ring_dilated_attention", "plan", "model", *options, "--hardware", str(here)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["meshes"][0]


def held_bytes() -> int:
    """The memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=3600, help="one for each second (default %(default)s)")
    parser.add_argument("--patches", type=int, default=256, help="tokens of a frame (default %(default)s)")
    parser.add_argument("--embed-dim", type=int, default=32, help="width (default %(default)s)")
    options = parser.parse_args(argv)
    sizes = options.patches, options.embed_dim
    clip = max(1, options.frames // 10)
    step(1, *sizes)  # the first call of a process takes longer
    _, seconds = step(clip, *sizes)
    speed = plan(clip, *sizes, flops=1e9)["seconds"] * 1e9 / seconds
    planned = plan(options.frames, *sizes, flops=speed)
    print(f"a clip of {clip} frames took {seconds:.1f} s: {speed:.1e} operations per second")
    tokens, gb = options.frames * options.patches, planned["memory"]["total"] / 1e9
    print(f"planned for {tokens:,} tokens: {gb:.2f} GB and {planned['seconds']:.1f} s", flush=True)
    before = held_bytes()
    loss, seconds = step(options.frames, *sizes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    print(f"measured: {(peak - before) / 1e9:.2f} GB and {seconds:.1f} s")
    print(f"loss {loss:.2f}; a guess has ln {CODES} = {torch.tensor(CODES).log():.2f}")


if __name__ == "__main__":
    main()

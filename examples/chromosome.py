"""A language model of a genome: FASTA, both strands, a held-out chromosome.

    python examples/chromosome.py              a made-up genome
    python examples/chromosome.py --fasta genome.fa --held-out chr5

Half of the windows are read as their reverse complement. The made-up genome
has random letters and families of repeats, all on one strand. So the model
learnt what it knows of the other strand from reverse complements alone.
"""

import argparse
import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_dilated_attention.models import LongNetConfig, LongNetLM

LETTERS = "ACGTN"  # N is an unknown base; it is read, but not counted in bits per base
COMPLEMENT = torch.tensor([3, 2, 1, 0, 4], dtype=torch.uint8)
UNKNOWN = 4


def read_fasta(path: Path) -> dict[str, Tensor]:
    """The bases of each record, uint8 numbers in LETTERS. Lower case is read as upper case, other letters as N."""
    genome: dict[str, list[str]] = {}
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    for line in text.splitlines():
        if line.startswith(">"):
            name = (line[1:].split() or [""])[0]
            if name in ("", *genome):
                raise ValueError(f"{path}: each record needs a name of its own, and one begins with {line!r}")
            genome[name] = []
        elif genome:
            genome[name].append(line.strip().upper())
    table = bytes(LETTERS.find(chr(code)) % len(LETTERS) for code in range(256))  # find gives -1, that is N
    numbers = {name: bytearray("".join(lines).encode().translate(table)) for name, lines in genome.items()}
    return {name: torch.frombuffer(bases, dtype=torch.uint8) for name, bases in numbers.items() if bases}


def make_genome(num_bases: int, num_families: int = 4, length: int = 120) -> tuple[dict[str, Tensor], float]:
    """Three chromosomes, and the bits per base of who knows each repeat from its first base: 2 for the rest."""
    families, genome, unique = torch.randint(4, (num_families, length)), {}, 0
    for name in ("chr1", "chr2", "chr3"):
        drawn, size = [], 0
        while size < num_bases:
            drawn += [torch.randint(4, (int(torch.randint(30, 91, ())),)), families[torch.randint(num_families, ())]]
            size += len(drawn[-2]) + length
            unique += len(drawn[-2])
        genome[name] = torch.cat(drawn).to(torch.uint8)
    return genome, 2 * unique / sum(map(len, genome.values()))


def reverse_complement(bases: Tensor) -> Tensor:
    return COMPLEMENT[bases.flip(-1).long()]


def windows(chromosomes: Sequence[Tensor], batch: int, seq_len: int) -> Tensor:
    """(batch, seq_len) from places drawn evenly over all chromosomes. Each is reversed and complemented or not."""
    starts = torch.tensor([len(bases) - seq_len + 1 for bases in chromosomes]).clamp(min=0).double()
    drawn = []
    for i in torch.multinomial(starts, batch, replacement=True).tolist():
        start = int(torch.randint(int(starts[i]), ()))
        window = chromosomes[i][start : start + seq_len]
        drawn.append(reverse_complement(window) if torch.rand(()) < 0.5 else window)
    return torch.stack(drawn)


@torch.no_grad()
def bits_per_base(model: LongNetLM, bases: Tensor, seq_len: int) -> float:
    """The mean over a chromosome, read in windows, of all known bases but the first of each window."""
    nats = known = 0.0
    for window in bases.split(seq_len):
        is_known = window[1:] != UNKNOWN
        logits, labels = model(window[None])[0, :-1][is_known], window[1:][is_known].long()
        nats += F.cross_entropy(logits.double(), labels, reduction="sum").item()
        known += is_known.sum().item()
    return nats / known / math.log(2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasta", type=Path, help="a genome (default: one that is made up)")
    parser.add_argument("--held-out", default="chr3", help="the record that is not trained on (default %(default)s)")
    parser.add_argument("--scored", type=int, default=200_000, help="bases, from a known one on (default %(default)s)")
    parser.add_argument("--bases", type=int, default=100_000, help="of a made-up chromosome (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=2048, help="bases of a window (default %(default)s)")
    parser.add_argument("--embed-dim", type=int, default=64, help="width (default %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="training steps (default %(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    try:
        genome, least = (read_fasta(options.fasta), None) if options.fasta else make_genome(options.bases)
    except (OSError, EOFError, ValueError) as error:
        parser.exit(2, f"--fasta: {error}\n")
    for name, bases in genome.items():
        held = ", held out" if name == options.held_out else ""
        print(f"{name}: {len(bases):,} bases, {(bases == UNKNOWN).sum():,} of them unknown{held}")
    chromosomes = [x for name, x in genome.items() if name != options.held_out and len(x) >= options.seq_len]
    held_out = genome.get(options.held_out, torch.tensor([UNKNOWN]))
    held_out = held_out[(held_out != UNKNOWN).byte().argmax() :][: options.scored]  # a real one begins with many N
    strands = held_out, reverse_complement(held_out)
    can_be_scored = [any((x[1:] != UNKNOWN).any() for x in strand.split(options.seq_len)) for strand in strands]
    if not chromosomes or not all(can_be_scored):
        message = f"give one of {list(genome)} with two known bases, beside others of --seq-len bases"
        parser.exit(2, f"--held-out {options.held_out}: {message}\n")

    lengths = (min(256, options.seq_len), options.seq_len)
    sizes = {"vocab_size": len(LETTERS), "embed_dim": options.embed_dim, "num_layers": 2}
    model = LongNetLM(LongNetConfig(lengths, (1, 8), **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        loss = model.loss(windows(chromosomes, 2, options.seq_len))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, options.steps // 6) == 0:
            print(f"step {step}: {loss.item() / math.log(2):.3f} bits per base", flush=True)
    forward, reverse = (bits_per_base(model, strand, options.seq_len) for strand in strands)
    print(f"{options.held_out}: {forward:.2f} bits per base, its other strand {reverse:.2f}")
    best = "" if least is None else f", and who knows each repeat from its first base {least:.2f}"
    print(f"a guess has 2.00{best}")


if __name__ == "__main__":
    main()

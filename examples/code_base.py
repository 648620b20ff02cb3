"""A language model of a code base, without padding, and text that goes on.

    python examples/code_base.py               this repository's src
    python examples/code_base.py --folder ~/project --suffix .c

Each file is a document. Documents are packed one after the other into
sequences, and `cu_seqlens` has their borders: positions start anew there, and
no document sees another. Every tenth file is held out.
"""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ring_dilated_attention.models import LongNetConfig, LongNetLM

Packed = tuple[Tensor, Tensor]  # tokens (1, N) and the borders of documents, int32


def read(folder: Path, suffix: str) -> list[bytes]:
    files = sorted(folder.rglob(f"*{suffix}"))
    return [content for file in files if file.is_file() and len(content := file.read_bytes()) > 1]


def pack(documents: Sequence[bytes], seq_len: int) -> list[Packed]:
    """Sequences of seq_len bytes. The rest of a document that does not fit is a document of the next sequence."""
    sequences: list[list[bytes]] = [[]]
    room = seq_len
    for document in documents:
        while document:
            text, document = document[:room], document[room:]
            sequences[-1].append(text)
            room -= len(text)
            if room < 2:  # one byte alone has nothing to predict
                sequences.append([])
                room = seq_len
    return [
        (torch.tensor([list(b"".join(texts))]), torch.tensor([0, *accumulate(map(len, texts))], dtype=torch.int32))
        for texts in sequences
        if any(len(text) > 1 for text in texts)
    ]


@torch.no_grad()
def bits_per_byte(model: LongNetLM, sequences: Sequence[Packed]) -> float:
    """The mean over all bytes but the first of each document."""
    counts = [tokens.shape[1] - (len(borders) - 1) for tokens, borders in sequences]
    nats = [model.loss(*packed).item() * count for packed, count in zip(sequences, counts, strict=True)]
    return sum(nats) / sum(counts) / math.log(2)


def bits_of_single_bytes(documents: Sequence[bytes]) -> float:
    """The entropy of the frequencies of bytes: what one reaches without any context."""
    counts = Counter(b"".join(documents))
    return -sum(count / counts.total() * math.log2(count / counts.total()) for count in counts.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "src", help="of the sources")
    parser.add_argument("--suffix", default=".py", help="of the files to read (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=4096, help="bytes of a step (default %(default)s)")
    parser.add_argument("--embed-dim", type=int, default=64, help="width (default %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default %(default)s)")
    parser.add_argument("--prompt", default="def ", help="how the generated text begins (default %(default)r)")
    options = parser.parse_args(argv)
    documents = read(options.folder, options.suffix)
    held_out, trained_on = documents[::10], [x for i, x in enumerate(documents) if i % 10]
    if not trained_on:
        parser.exit(2, f"{options.folder} has {len(documents)} files *{options.suffix}: at least two are needed\n")
    sequences, kept = pack(trained_on, options.seq_len), pack(held_out, options.seq_len)[:8]
    mean = sum(len(borders) - 1 for _, borders in sequences) / len(sequences)
    print(f"{len(documents)} files in {len(sequences)} sequences, with {mean:.1f} documents each; no padding")

    torch.manual_seed(0)
    lengths = (min(256, options.seq_len), options.seq_len)
    model = LongNetLM(LongNetConfig(lengths, (1, 4), embed_dim=options.embed_dim, num_layers=2))
    tokens, borders = max(kept, key=lambda packed: len(packed[1]))  # the one with most documents
    texts = [text for text in tokens.split(borders.diff().tolist(), dim=1) if text.shape[1] > 1]
    together = bits_per_byte(model, [(tokens, borders)])
    alone = bits_per_byte(model, [(text, torch.tensor([0, text.shape[1]], dtype=torch.int32)) for text in texts])
    print(
        f"before training, {len(texts)} documents packed {together:.5f}, one by one {alone:.5f} bits per byte",
        flush=True,
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, index in enumerate(torch.randint(len(sequences), (options.steps,)).tolist(), start=1):
        loss = model.loss(*sequences[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, options.steps // 6) == 0:
            print(f"step {step}: {loss.item() / math.log(2):.2f} bits per byte", flush=True)
    reached, without = bits_per_byte(model, kept), bits_of_single_bytes(held_out)
    print(f"held-out files: {reached:.2f} bits per byte; {without:.2f} by the frequencies of bytes alone")
    prompt = torch.tensor([list(options.prompt.encode())])
    written = torch.cat(list(model.generate(prompt, 80, temperature=0.7, seed=0)))
    print(options.prompt + bytes(written.tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()

"""What the tests of several rooms use."""

import json
import math
import socket
from collections import Counter
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

import pytest
import torch

from ring_dilated_attention import dilated_attention
from ring_dilated_attention.commands import cli
from ring_dilated_attention.ranks.reshard import own_rows
from ring_dilated_attention.reference import dilated_attention_reference, multiplicity

ROOT = Path(__file__).parents[1]  # of the clone
# Options that change no graph. Vectors and precompiled headers take inductor some twenty seconds where its cache is
# empty. The cache keeps one such header for all values of ATEN_CPU_CAPABILITY: code compiled under another fails.
PLAIN = {"cpp.simdlen": 0, "cpp_cache_precompile_headers": False}
# A document, and the options of `rda train` for a model that learns it within a second or two.
TEXT = b"".join(f"line {i} of the document\n".encode() for i in range(400))
TINY = "--seq-len 48 --embed-dim 16 --num-heads 2 --held-out-bytes 96 --segment-lengths 8 48 --dilation-rates 1 3"


_HELD: list[socket.socket] = []  # of `free_port`


def message_of(call, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def rows_of(parallel, x, dim=1):
    """This rank's rows of a whole tensor, as `shard` gives them, but without a handshake: to compare many results."""
    ranks = parallel.ranks
    return own_rows(x, ranks.shards(ranks.lengths_of(x.shape[dim]))[ranks.rank], dim)


def relative_error(x, exact):
    return ((x.double() - exact.double()).norm() / exact.double().norm()).item()


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make_tokens(vocab_size, batch, seq_len, seed=1):
    return torch.randint(
        0, vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(seed)
    )


def heard_after(pattern, n, num_heads):
    """By the definition: (n, n) bool, whether query i has heard of position j, after each layer."""
    sees = (multiplicity(pattern, n, num_heads).sum(0) > 0).float()
    heard = torch.eye(n)
    while True:
        before, heard = heard, ((heard @ sees) + heard > 0).float()
        if heard.equal(before):
            yield from repeat(heard > 0)  # more layers add nothing
        yield heard > 0


def keys_seen(pattern, borders, num_heads, is_causal):
    """[head][query position] -> how often it sees each key position. Written from the definition, not from the code."""
    seen = [[Counter() for _ in range(borders[-1])] for _ in range(num_heads)]
    for b, (w, r, is_window) in enumerate(pattern.branches):
        for h in range(num_heads):
            if pattern.heads == "split":
                sizes = [
                    len(own)
                    for own in torch.arange(num_heads).tensor_split(len(pattern.segment_lengths))
                ]
                if not sum(sizes[:b]) <= h < sum(sizes[: b + 1]):
                    continue
                phase = b % r
            else:
                phase = h % r if pattern.phase == "modulo" else h // math.ceil(num_heads / r)
            for start, stop in zip(borders, borders[1:], strict=False):  # noqa: RUF007  reads as the definition does
                for i in range(stop - start):
                    for j in range(stop - start):
                        if is_window:
                            in_reach = i - j < w if is_causal else abs(i - j) <= w // 2
                        else:
                            in_reach = i // w == j // w and i % w % r == j % w % r == phase
                        if in_reach and (j <= i or not is_causal):
                            seen[h][start + i][start + j] += 1
    return seen


class StopAfter:
    """Asks to stop during the given step, counted from the start of the call."""

    def __init__(self, step):
        self.left = step

    @property
    def requested(self):
        self.left -= 1
        return self.left <= 0


def sign(folder, state=None, *, pattern="shard-*.safetensors"):
    """Make a checkpoint's digests those of the files that are there, as only somebody who means it would."""
    from ring_dilated_attention.models.saved_run import STATE_FILE, identity
    from ring_dilated_attention.training.checkpoint import signed

    files = {path.name: identity(path) for path in folder.glob(pattern)}
    if state is None:
        state = json.loads((folder / STATE_FILE).read_text())["state"]
    (folder / STATE_FILE).write_text(signed(files, state))


def words(capsys, *argv):
    """What a command prints, without the ends of lines."""
    assert cli.main(list(argv)) == 0
    return " ".join(capsys.readouterr().out.split())


def compare(inputs, pattern, *, dout=None, dlse=None, scale=None, sinks=None, tolerance=1e-11):
    """Value, lse and gradients equal the definition's, which is computed in float64."""
    dout = torch.randn_like(inputs[0]) if dout is None else dout
    dlse = torch.randn_like(inputs[0][..., 0]) if dlse is None else dlse
    wanted = inputs if sinks is None else [*inputs, sinks]

    def run(function, dtype, name_of_sinks, **kwargs):
        leaves = [x.detach().to(dtype).requires_grad_() for x in wanted]  # keeps the strides
        if sinks is not None:
            kwargs[name_of_sinks] = leaves[3]
        out, lse = function(*leaves[:3], pattern, scale=scale, **kwargs)
        grads = torch.autograd.grad([out, lse], leaves, [dout.to(dtype), dlse.to(dtype)])
        return [out.detach(), lse.detach(), *grads]

    expected = run(dilated_attention_reference, torch.float64, "sinks_H")
    actual = run(dilated_attention, inputs[0].dtype, "sinks", return_lse=True)
    # float64 rounds at 2e-16; scores here are below 100 and sums have below 1,000 terms
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)
    return actual


@contextmanager
def poisoned_memory(*, warn_only=False):
    """torch.empty gives NaN: whatever is read before it is written shows.

    warn_only: torch fills memory all the same, but may take ops that are not deterministic, as it does by default.
    """
    before = torch.get_deterministic_debug_mode()  # 0: none, 1: it warns, 2: it raises
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before > 0, warn_only=before == 1)


def free_port():
    """It stays bound here, so that Linux gives it to nobody else. Whoever listens by its number may share it."""
    _HELD.append(socket.socket())
    _HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _HELD[-1].bind(("127.0.0.1", 0))
    return str(_HELD[-1].getsockname()[1])

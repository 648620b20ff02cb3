"""What tests of ranks share: a step of several ranks against the definition, what one rank alone gets wrong, and what a
rank posts.
"""

import time
import warnings
from datetime import timedelta
from functools import partial

import torch
from helpers import message_of, rows_of
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.ranks.link import GroupLink
from ring_dilated_attention.reference import dilated_attention_reference

PATTERN = DilatedPattern((4, 16), (1, 2), is_causal=True)
DENSE = DilatedPattern.dense()
PATIENCE = timedelta(seconds=20)  # more than a test may take: no rank gets its error from a clock


def strict():
    """What pytest does in its own process: warnings are errors. And uninitialised memory is NaN."""
    warnings.simplefilter("error")
    # Ranks here choose their lengths, and drop contexts, as they like. What is said then has tests of its own.
    warnings.filterwarnings("ignore", message="ranks have .* positions; a near-equal cut")
    warnings.filterwarnings("ignore", message=".* was dropped without close")
    torch.use_deterministic_algorithms(True)
    assert torch.empty(9).isnan().all()


def mesh_of(*shape):
    """Of CPUs: its outer axis is a ring, and heads are dealt along its inner one."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("ring", "heads"))


def whole(seq_len, heads=(4, 2, 2), batch=1, head_dim=8, dtype=torch.float64):
    """Query, key and value, the same on every rank."""
    generator = torch.Generator().manual_seed(seq_len)
    shapes = [(batch, seq_len, h, head_dim) for h in heads]
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def with_gradients(attend, inputs, gradients=None):
    """out, lse, and the gradients of query, key and value. gradients: those of out and lse, or else of their sines."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = attend(*leaves)
    if gradients is None:
        finite = lse.detach().masked_fill(lse == -torch.inf, 0)
        gradients = out.detach().cos(), finite.cos().where(lse > -torch.inf, 0)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, gradients)]


def check_step(parallel, inputs=None, pattern=PATTERN, borders=None, cut=None, bound=1e-12):
    """A forward and a backward give this rank its rows of what the definition gives. cut: its rows of a tensor."""
    inputs = whole(21) if inputs is None else inputs
    cut = partial(rows_of, parallel) if cut is None else cut
    options = {"pattern": pattern, "parallel": parallel, "cu_seqlens": borders}
    attend = partial(dilated_attention, return_lse=True, **options)
    found = with_gradients(attend, [cut(x) for x in inputs])
    documents = None if borders is None else borders.tolist()
    reference = partial(dilated_attention_reference, pattern=pattern, cu_seqlens=documents)
    for x, exact in zip(found, with_gradients(reference, inputs), strict=True):
        torch.testing.assert_close(x, cut(exact), rtol=0, atol=bound)


def check_refused(rank, world_size, cases):
    """(function, what is right, what one rank alone gives it, words of the error): each rank in turn is that one. All
    raise at once, and the others know whose mistake it is."""
    for odd in range(world_size):
        for function, right, wrong, words in cases:
            started = time.monotonic()
            given = wrong if rank == odd else right
            message = message_of(partial(function, given), Exception)
            assert words in message, message
            is_told = f"rank {odd} refused the call: " in message
            assert is_told == (rank != odd) or "ranks disagree on" in message, message
            assert time.monotonic() - started < PATIENCE.total_seconds() / 2


def noted_messages(of_handshakes=False):
    """Every message that this process posts from now on: those of handshakes, or all others."""
    noted, post = [], GroupLink._post

    def noting_post(link, messages, moment):
        if link.name.startswith("control") == of_handshakes:
            noted.extend(messages)
        return post(link, messages, moment)

    GroupLink._post = noting_post
    return noted

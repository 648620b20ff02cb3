"""A DataLoader forks its workers. Each has a copy of a context, none of its threads, and its parent's connections."""

import gc
import os
import signal
from functools import partial
from multiprocessing import current_process, get_context

import pytest
import torch
from definition import PATIENCE, PATTERN
from distributed import run
from helpers import message_of
from torch.utils.data import DataLoader

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    dilated_attention,
    explain,
)
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.ranks import watching
from ring_dilated_attention.training.agreement import values_of_all

X = torch.ones(1, 8, 2, 8, requires_grad=True)
TOKENS = torch.arange(17)[None]


def attention(cp, exponent=1.0):
    out = dilated_attention(X, X, X, PATTERN, parallel=cp, scale=exponent)
    return torch.autograd.grad(out.sum(), X)[0]


def calls(cp, model, out):
    """All that talk to other ranks."""
    return [
        lambda: attention(cp),  # which was made before
        lambda: attention(cp, 0.5),  # which was not
        lambda: torch.autograd.grad(out.sum(), X, retain_graph=True),
        lambda: cp.shard(TOKENS),
        lambda: cp.shard_batch({"tokens": TOKENS}),
        lambda: cp.shard_batch({"tokens": TOKENS}, source=0),
        lambda: cp.unshard(X),
        lambda: cp.mean_loss(X.sum(), 8),
        lambda: model.loss(TOKENS),
        lambda: DilatedCache.gather(cp, X, X, PATTERN, 2),
        lambda: values_of_all(cp, 1),
        lambda: cp.ranks.records(torch.zeros(1), "records"),
    ]


def collate(cp, model, out, parent, rows):
    """In the worker."""
    assert os.getpid() != parent
    signal.alarm(20)  # ends a worker that waits for ever, which nobody else would
    for call in calls(cp, model, out):
        said = message_of(call)
        assert (
            f"process {os.getpid()} was forked from process {parent}, which made {cp.name}" in said
        ), said
        assert "in the training loop, on what the DataLoader returns" in said
    assert "kernel" in str(explain(X, X, X, PATTERN, parallel=cp))
    cp.abandon("an error of a worker")
    cp.close()
    return cp.positions(17)


def rank_loads(rank, world_size):
    # so that it may start workers, as a rank of torchrun may
    current_process()._config["daemon"] = False
    cp = ContextParallel(timeout=PATIENCE)
    model = LongNetLM(
        LongNetConfig((4, 16), (1, 2), embed_dim=8, num_layers=1, num_heads=2), parallel=cp
    )
    expected = attention(cp)
    out = dilated_attention(X, X, X, PATTERN, parallel=cp)
    in_worker = partial(collate, cp, model, out, os.getpid())
    loader = DataLoader(
        [0, 1], num_workers=1, timeout=30, collate_fn=in_worker, multiprocessing_context="fork"
    )
    for _ in range(2):
        assert [x.tolist() for x in loader] == 2 * [cp.positions(17).tolist()]
        assert torch.equal(attention(cp), expected)
    torch.autograd.grad(out.sum(), X)
    cp.shard_batch({"tokens": TOKENS}, source=1)
    cp.close()


def rank_closes_beside_a_worker(rank, world_size):
    current_process()._config["daemon"] = False
    for _ in range(6):
        cp = ContextParallel(timeout=PATIENCE)
        attention(cp)
        worker = iter(
            DataLoader(range(99), num_workers=1, collate_fn=list, multiprocessing_context="fork")
        )
        next(worker)
        attention(cp)
        cp.close()
        del worker


def test_a_context_is_closed_while_a_worker_lives():
    """Catches connections that gloo closes while a forked process has copies of them: it ends the process (SIGABRT) if
    it connects ranks at their first message (TORCH_GLOO_LAZY_INIT)."""
    run(2, rank_closes_beside_a_worker)


def test_a_worker_of_a_data_loader():
    """Catches a worker that waits for ever for a thread that it does not have, and that takes the parent's messages."""
    run(2, rank_loads, seconds=50)


def rank_forks(rank, world_size):
    current_process()._config["daemon"] = False
    contexts = [ContextParallel(timeout=PATIENCE)]
    expected = attention(contexts[0])

    def leave():
        contexts.clear()
        gc.collect()
        watching.end_all_threads()  # at the end of a Python that ends by itself

    child = get_context("fork").Process(target=leave)
    child.start()
    child.join()
    assert child.exitcode == 0
    for _ in range(2):
        assert torch.equal(attention(contexts[0]), expected)
    contexts[0].close()


@pytest.mark.filterwarnings("error")
def test_a_child_that_ends():
    """Catches a child that closes its parent's connections when it frees the context, or when it ends."""
    run(2, rank_forks, seconds=30)

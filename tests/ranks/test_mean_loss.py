"""`mean_loss`: what it takes; unequal replicas, micro-batches of one step, and samples without a label. `make fuzz`,
kind `ranks`, has sums and counts of all forms, and labels that are ignored.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from definition import PATIENCE
from distributed import run
from helpers import message_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss
from ring_dilated_attention.ranks.link import ExchangeError

LENGTHS = ((41, 13), (9, 7))  # of two micro-batches, in each of two replicas
CONFIG = LongNetConfig((4, 16), (1, 2), embed_dim=16, num_layers=1, num_heads=2, vocab_size=40)


@pytest.mark.parametrize("count", [2.0**24 + 1, 2**70, 1.6e308, 0.1 + 1, torch.tensor(2**40 + 1)])
def test_counts_keep_their_value(count):
    """Catches a count that becomes a float32 on its way."""
    total = torch.tensor(3.0, dtype=torch.float64)
    assert ContextParallel().mean_loss(total, count).item() == 3.0 / float(count)
    assert ContextParallel().mean_loss(total, 1, step_count=count).item() == 3.0 / float(count)


ONE = torch.ones(1)
NO_NUMBERS = [torch.tensor(1j), ONE.to("meta"), ONE.to_sparse()]
NO_COUNTS = ["x", {}, [3], True, 1j, -0.5, 10**400, math.nan, math.inf, *NO_NUMBERS]
NO_COUNTS += [torch.tensor(x) for x in (True, -3, math.nan, [1, 2], [])]
NO_SUMS = [None, "x", 3.0, [ONE], torch.tensor(3), torch.tensor(True), torch.ones(2), torch.ones(0)]


def test_what_is_no_number_is_told_with_its_name():
    """Catches torch's own errors ("Could not infer dtype of NoneType"), which name no argument."""
    mean_loss, total = ContextParallel().mean_loss, torch.ones(())
    for count in [*NO_COUNTS, None]:
        with pytest.raises(ValueError, match="local_count must be a number of at least 0"):
            mean_loss(total, count)
    for count in NO_COUNTS:
        with pytest.raises(ValueError, match="step_count must be a number of at least 0"):
            mean_loss(total, 1, step_count=count)
    for no_sum in NO_SUMS + NO_NUMBERS:
        with pytest.raises(ValueError, match="local_sum must be one number"):
            mean_loss(no_sum, 3)


def contexts():
    """A mesh of two replicas of two ranks, a context of this replica's, and one of all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    groups = (mesh["cp"], None)
    return mesh, *(ContextParallel(group, timeout=PATIENCE) for group in groups)


def language_model(parallel=None):
    torch.manual_seed(0)
    return LongNetLM(CONFIG, parallel=parallel).double()


def rank_has_unequal_replicas(rank, world_size):
    mesh, parallel, everyone = contexts()
    texts = [[torch.randint(40, (1, length)) for length in lengths] for lengths in LENGTHS]
    replica = mesh.get_local_rank("dp")
    for num_batches, kind in ((1, "DDP"), (2, "DDP"), (2, "FSDP2")):
        of_step = [text for lengths in texts for text in lengths[:num_batches]]
        total = sum(text.shape[1] - 1 for text in of_step)
        expected = language_model()
        right = sum(expected.loss(text, step_count=total) for text in of_step)
        right.backward()
        model = NextTokenLoss(language_model(parallel))
        wrapped = (
            nn.parallel.DistributedDataParallel(model) if kind == "DDP" else fully_shard(model)
        )
        step_count = total / world_size if num_batches > 1 else None
        losses = []
        for number, text in enumerate(texts[replica][:num_batches], start=1):
            is_last = number == num_batches
            if kind == "FSDP2":
                wrapped.set_requires_gradient_sync(is_last)
            with wrapped.no_sync() if kind == "DDP" and not is_last else nullcontext():
                loss = wrapped(parallel.shard(text), over=everyone, step_count=step_count)
                loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(sum(losses), right.detach(), rtol=1e-12, atol=0)
        for (name, x), y in zip(expected.named_parameters(), model.parameters(), strict=True):
            grad = y.grad.full_tensor() if hasattr(y.grad, "full_tensor") else y.grad
            assert (grad - x.grad).norm() < 1e-11 * x.grad.norm(), name
    assert "`over` needs a model whose ranks share" in message_of(
        lambda: expected.loss(texts[0][0], over=everyone)
    )


def test_unequal_replicas_and_micro_batches():
    """Catches a mean of the replicas' means, and a mean of the micro-batches' means."""
    run(4, rank_has_unequal_replicas)


def rank_has_no_label(rank, world_size):
    parallel = ContextParallel(timeout=PATIENCE)
    for given in (0.0, math.nan):
        own = torch.tensor(given, requires_grad=True)
        for count, step_count in ((0, None), (torch.tensor(0), 5)):
            loss = parallel.mean_loss(own, count, step_count=step_count)
            (grad,) = torch.autograd.grad(loss, own)
            assert (loss.item(), grad.item()) == (0, 0)
    for over in {None, parallel}:
        text = language_model(parallel)
        text.loss(parallel.shard(torch.zeros(1, 1, dtype=torch.int64)), over=over).backward()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in text.parameters())
    said = f"the ranks have a loss of {world_size} in all, and 0 terms"
    assert said in message_of(lambda: parallel.mean_loss(torch.ones(()), 0))
    too_few = message_of(lambda: parallel.mean_loss(torch.ones(()), 1e-3))
    assert "terms of a loss in all: a mean needs one at least" in too_few


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sample_without_a_label(world_size):
    """Catches 0 / 0, 0 times infinity in backward, and a sum whose count was forgotten."""
    run(world_size, rank_has_no_label)


def rank_is_given_what_cannot_be(rank, world_size):
    mesh, parallel, everyone = contexts()
    replicas, another = ContextParallel(mesh["dp"], timeout=PATIENCE), contexts()[2]
    one, odd = torch.ones(()), rank % 2 == 1
    theirs, missing = [rank % 2, rank % 2 + 2], rank + 1 - 2 * (rank % 2)
    lacks = f"over is a context of ranks {theirs}, and lacks the ranks [{missing}] of this one"
    no_step = "step_count must be a number of at least 0, how many terms the sum has, got -1"
    unlike = "ranks disagree on call: rank {} has mean_loss, rank {} has mean_loss with step_count"
    for over, step_count, said in (
        (everyone, 0, "step_count=0, but this micro-batch alone has 4 terms"),
        (everyone, -1 if rank == 1 else 3, no_step),
        (everyone, 3 if rank == 1 else None, unlike.format(0, 1)),
        (replicas, None, lacks),
        (replicas, None, "pass a context of all ranks whose gradients are averaged"),
        (another if odd else None, None, "ranks disagree on call"),
    ):
        assert said in message_of(
            partial(parallel.mean_loss, one, 1, over=over, step_count=step_count)
        )
    assert parallel.mean_loss(one, 1, over=everyone) == 1
    own, all_ranks = f"{parallel.name} of ranks [0, 1]", f"{everyone.name} of ranks [0, 1, 2, 3]"
    mistakes = {
        "mesh": "over must be a ContextParallel of all ranks whose terms count, got 'mesh'",
        parallel: f"disagree on over: rank 0 has {all_ranks}, rank 1 has {own}",
    }
    for mistake, said in mistakes.items():
        over = contexts()[2] if mistake == "mesh" else everyone
        attempt = partial(parallel.mean_loss, one, 1, over=mistake if rank == 1 else over)
        if rank < 2:
            assert said in message_of(attempt)
            assert parallel.mean_loss(one, 1) == 1  # the context that agreed is whole
        else:  # they wait for ranks 0 and 1, which have no way to tell them
            message_of(attempt, ExchangeError)
            break


def test_numbers_and_contexts_that_cannot_be():
    """Catches an error that one rank raises alone, and ranks that wait in different contexts until they time out."""
    run(4, rank_is_given_what_cannot_be, seconds=15)

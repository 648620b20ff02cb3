"""`mean_loss`: what it takes; unequal replicas, micro-batches of one step, and samples without a label. `make fuzz`,
kind `losses`, has sums and counts of all forms.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import math
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from distributed import run
from helpers import message_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ring_dilated_attention import ContextParallel, DilatedPattern
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss
from ring_dilated_attention.ranks.link import ExchangeError

PATTERN = DilatedPattern((4, 16), (1, 2), is_causal=True)
PATIENCE = timedelta(seconds=20)
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


class Tagger(nn.Module):
    def __init__(self, parallel=None):
        super().__init__()
        torch.manual_seed(0)
        self.attention = MultiheadDilatedAttention(16, 2, PATTERN, parallel=parallel)
        self.head = nn.Linear(16, 5)
        self.double()

    def forward(self, x, labels):
        logits = self.head(self.attention(x, x, x)[0])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def sample(length):
    """The last labels of a sample do not count."""
    generator = torch.Generator().manual_seed(length)
    labels = torch.randint(5, (1, length), generator=generator)
    labels[:, -3:] = -100
    return torch.randn(1, length, 16, generator=generator, dtype=torch.float64), labels


def num_terms(labels):
    return int((labels != -100).sum())


def close(model, expected):
    for (name, x), y in zip(expected.named_parameters(), model.parameters(), strict=True):
        grad = y.grad.full_tensor() if hasattr(y.grad, "full_tensor") else y.grad
        assert (grad - x.grad).norm() < 1e-11 * x.grad.norm(), name


def rank_has_unequal_replicas(rank, world_size):
    mesh, parallel, everyone = contexts()
    replica = mesh.get_local_rank("dp")
    for is_step, kind in ((False, "DDP"), (True, "DDP"), (True, "FSDP2")):
        micro_batches = [0, 1] if is_step else [0]
        samples = [sample(lengths[i]) for lengths in LENGTHS for i in micro_batches]
        expected = Tagger()
        right = sum(expected(x, y) for x, y in samples) / sum(num_terms(y) for _, y in samples)
        right.backward()
        model = Tagger(parallel)
        if kind == "DDP":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            wrapped = fully_shard(model)
        own = [
            parallel.shard_batch(dict(zip("xy", sample(LENGTHS[replica][i]), strict=True)))
            for i in micro_batches
        ]
        step_count = sum(num_terms(batch["y"]) for batch in own) if is_step else None
        losses = []
        for number, batch in enumerate(own, start=1):
            is_last = number == len(own)
            if kind == "FSDP2":
                wrapped.set_requires_gradient_sync(is_last)
            with wrapped.no_sync() if kind == "DDP" and not is_last else nullcontext():
                terms = wrapped(batch["x"], batch["y"])
                counts = torch.tensor(num_terms(batch["y"]))
                loss = parallel.mean_loss(terms, counts, over=everyone, step_count=step_count)
                loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(sum(losses), right.detach(), rtol=1e-12, atol=0)
        close(model, expected)


def test_unequal_replicas_and_micro_batches():
    """Catches a mean of the replicas' means, and a mean of the micro-batches' means."""
    run(4, rank_has_unequal_replicas)


def rank_trains_a_language_model(rank, world_size):
    mesh, parallel, everyone = contexts()
    texts = [[torch.randint(40, (1, length)) for length in lengths] for lengths in LENGTHS]
    total = sum(text.shape[1] - 1 for lengths in texts for text in lengths)
    torch.manual_seed(0)
    expected = LongNetLM(CONFIG).double()
    for lengths in texts:
        for text in lengths:
            expected.loss(text, step_count=total).backward()
    torch.manual_seed(0)
    model = NextTokenLoss(LongNetLM(CONFIG, parallel=parallel).double())
    fully_shard(model)
    for i, text in enumerate(texts[mesh.get_local_rank("dp")]):
        model.set_requires_gradient_sync(i == 1)
        model(parallel.shard(text), over=everyone, step_count=total / world_size).backward()
    close(model.model, expected)
    assert "`over` needs a model whose ranks share" in message_of(
        lambda: expected.loss(texts[0][0], over=everyone)
    )


def test_a_language_model_on_unequal_replicas():
    """`over` and `step_count` reach `mean_loss`; on one device too."""
    run(4, rank_trains_a_language_model)


def rank_has_no_label(rank, world_size):
    parallel = ContextParallel(timeout=PATIENCE)
    for given in (0.0, math.nan):
        own = torch.tensor(given, requires_grad=True)
        loss = parallel.mean_loss(own, 0)
        (grad,) = torch.autograd.grad(loss, own)
        assert (loss.item(), grad.item()) == (0, 0)
        loss = parallel.mean_loss(own, torch.tensor(0), step_count=5)
        (grad,) = torch.autograd.grad(loss, own)
        assert (loss.item(), grad.item()) == (0, 0)
    model = Tagger(parallel)
    x, labels = sample(11)
    local = parallel.shard_batch({"x": x, "y": torch.full_like(labels, -100)})
    parallel.mean_loss(model(local["x"], local["y"]), 0).backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
    for over in {None, parallel}:
        torch.manual_seed(0)
        text = LongNetLM(CONFIG, parallel=parallel)
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
        (everyone, 0, "4 terms in this micro-batch and step_count=0 in all"),
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

"""One rule: averaged over the ranks, what a backward computes is the gradient of the mean of the ranks' losses.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from definition import PATIENCE, PATTERN
from distributed import run
from torch import nn
from torch.distributed.fsdp import fully_shard

from ring_dilated_attention import ContextParallel, simulate
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.plan.sharding import SHARDINGS
from ring_dilated_attention.ranks.reduce import SumOverRanks

N = 23  # patches
BORDERS = torch.tensor([0, 9, N], dtype=torch.int32)


class Net(nn.Module):
    """Patches of the whole -> shard -> layers -> unshard -> head. Called with the name of a loss, a row of `LOSSES`."""

    def __init__(self, parallel, cu_seqlens):
        super().__init__()
        torch.manual_seed(0)
        self.parallel, self.cu_seqlens = parallel, cu_seqlens
        self.patches = nn.Conv1d(3, 16, 4, stride=4)
        self.layers = nn.ModuleList(
            MultiheadDilatedAttention(16, 2, PATTERN, parallel=parallel) for _ in range(2)
        )
        self.head = nn.Linear(16, 5)
        self.double()

    def cut(self, x):
        return self.parallel.shard(x, cu_seqlens=self.cu_seqlens)

    def join(self, x):
        return self.parallel.unshard(x, cu_seqlens=self.cu_seqlens)

    def hidden(self, video):
        x = self.cut(self.patches(video).transpose(1, 2))
        for layer in self.layers:
            x = x + layer(x, x, x, cu_seqlens=self.cu_seqlens)[0]
        return x

    def forward(self, loss, video, labels):
        return LOSSES[loss](self, video, labels)


def tokens(net, video, labels):
    """On shards."""
    own = net.cut(labels)
    logits = net.head(net.hidden(video))
    return net.parallel.mean_loss(
        F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum"), own.numel()
    )


def reward(net, video, labels):
    """On the whole, the same on all ranks."""
    return ((net.head(net.join(net.hidden(video))[:, -1])[:, 0] - 1) ** 2).sum()


def pooled(net, video, labels):
    return F.cross_entropy(net.head(net.join(net.hidden(video)).mean(1)), labels[:, 0])


def preference(net, video, labels):
    """DPO: the log-likelihoods of two sequences. One is joined from shards of positions, one is a sum over ranks."""
    scores = []
    for sample in (video, video.flip(-1)):
        nats = F.cross_entropy(net.head(net.hidden(sample)).mT, net.cut(labels), reduction="none")
        if not scores:
            scores.append(-net.join(nats).sum())
        else:
            scores.append(-SumOverRanks.apply(nats.sum(), net.parallel.ranks))
    reference = 0.3
    return -F.logsigmoid(0.1 * (scores[0] - scores[1] - reference))


def apart(net, video, labels):
    """Each rank has the loss of some positions of the whole, and their mean is the loss of all."""
    logits = net.head(net.join(net.hidden(video)))
    rank, size = net.parallel.rank, net.parallel.world_size
    own = F.cross_entropy(logits[:, rank::size].mT, labels[:, rank::size], reduction="sum")
    return own * size / labels.numel()


LOSSES = {f.__name__: f for f in (tokens, reward, pooled, preference, apart)}
CUTS = {name: {"sharding": name} for name in SHARDINGS} | {"uneven": {"lengths": (5, 0, 18)}}


def wrapped(net, wrapper):
    if wrapper == "DDP":
        return nn.parallel.DistributedDataParallel(net)
    if wrapper == "FSDP2":
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
    return net


def rank_follows_the_rule(rank, world_size, cut, losses, wrappers):
    video = torch.randn(1, 3, 4 * N, dtype=torch.float64)
    labels = torch.randint(5, (1, N))
    parallel = ContextParallel(timeout=PATIENCE, **CUTS[cut])
    cu_seqlens = BORDERS if parallel.ranks.cut.needs_documents else None
    groups = [dist.new_group([member]) for member in range(world_size)]
    for loss, wrapper in itertools.product(losses, wrappers):
        alone = Net(ContextParallel(groups[rank]), cu_seqlens)
        net = Net(parallel, cu_seqlens)
        model = wrapped(net, wrapper)
        of_one, of_rank = (video.clone().requires_grad_() for _ in range(2))
        expected = alone(loss, of_one, labels)
        expected.backward()
        found = model(loss, of_rank, labels)
        found.backward()
        mean = found.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / world_size, expected.detach(), rtol=1e-12, atol=0)
        pairs = dict(net.named_parameters(), video=of_rank)
        for name, parameter in dict(alone.named_parameters(), video=of_one).items():
            right, grad = parameter.grad, pairs[name].grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
            if wrapper is None or name == "video":
                dist.all_reduce(grad)
                grad /= world_size
            error = ((grad - right).norm() / right.norm()).item()
            assert error < 1e-11, (loss, wrapper, name, error, grad.norm() / right.norm())
    parallel.close()


@pytest.mark.parametrize(
    ("world_size", "cut", "losses", "wrappers"),
    [
        *((2, name, LOSSES, (None,)) for name in SHARDINGS),
        (2, "contiguous", ("tokens", "preference", "apart"), ("DDP", "FSDP2")),
        (3, "uneven", LOSSES, (None, "DDP")),
        (3, "zigzag", LOSSES, ("DDP",)),
    ],
)
def test_the_mean_of_the_ranks_gradients(world_size, cut, losses, wrappers):
    """Catches gradients before `shard` that are p times too large, and before `unshard` p times too small."""
    run(world_size, rank_follows_the_rule, cut, tuple(losses), wrappers)


def test_the_rule_on_simulated_ranks():
    """All ranks in one process are one rank to a trainer."""
    x = torch.randn(1, 8, 2, dtype=torch.float64, requires_grad=True)
    parallel = simulate.all_ranks(3)
    weight = torch.randn(1, 8, 2, dtype=torch.float64)
    (parallel.unshard(parallel.shard(x)) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def rank_has_other_gradients(rank, world_size):
    """Every dtype, along any dim, with losses that differ between ranks."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)
    for options in CUTS.values():
        parallel = ContextParallel(timeout=PATIENCE, **options)
        cu_seqlens = BORDERS if parallel.ranks.cut.needs_documents else None
        for dim, dtype in itertools.product((1, -1, -3), dtypes):
            shape = [2, 3, 2]
            shape[dim] = N
            weights = torch.randn(world_size, *shape, dtype=torch.float64)
            given = weights.to(dtype)
            wide = given.to(torch.promote_types(dtype, torch.float32))
            full = torch.zeros(shape, dtype=dtype, requires_grad=True)
            rows = parallel.shard(full, dim, cu_seqlens=cu_seqlens)
            own = parallel.shard(given[0], dim, cu_seqlens=cu_seqlens)
            [grad] = torch.autograd.grad(rows, full, own)  # all of it, on every rank
            torch.testing.assert_close(grad, (wide[0] / world_size).to(dtype))
            rows = rows.detach().requires_grad_()
            parallel.unshard(rows, dim, cu_seqlens=cu_seqlens).backward(given[rank])
            right = parallel.shard(wide.sum(0).to(dtype), dim, cu_seqlens=cu_seqlens)
            torch.testing.assert_close(rows.grad, right)
        parallel.close()
    parallel, x = ContextParallel(timeout=PATIENCE), torch.ones(1, 4, requires_grad=True)
    for call in (parallel.shard, parallel.unshard):
        [grad] = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_losses_that_differ_between_ranks():
    """Catches a gradient that is a rank's own part, rows in another order, 16-bit sums that round at each rank, a rank
    without rows, and a second derivative of one's own rows."""
    run(3, rank_has_other_gradients)

"""accelerate's own loop on sequences that ranks share, against one rank.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import pytest
from accelerate import Accelerator
from distributed import LIKE_NCCL, RankFailedError, over_gloo, run
from steps import PER_STEP, SAMPLES, assert_same, environment, make_loss, optimizer_of, take_steps
from torch.utils.data import DataLoader

from ring_dilated_attention import ContextParallel


def rank_takes_steps(rank, world_size, own_loader):
    environment(rank, world_size)
    accelerator = Accelerator(cpu=True)
    parallel = ContextParallel(sharding="zigzag")
    model = make_loss(parallel)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    loader = DataLoader(SAMPLES, batch_size=PER_STEP)
    if not own_loader:
        loader = accelerator.prepare(loader)

    def loss_of(tokens):
        return model(parallel.shard_batch({"tokens": tokens})["tokens"])

    found = take_steps(model, optimizer, loss_of, accelerator.backward, loader)
    names = {name.removeprefix("module."): x for name, x in found.parameters.items()}
    assert_same(found._replace(parameters=names))


def test_a_loader_that_accelerate_does_not_deal_from():
    run(2, rank_takes_steps, True, seconds=120)


def rank_takes_steps_without_cpu(rank, world_size):
    with over_gloo():
        rank_takes_steps(rank, world_size, True)


def test_a_group_without_a_backend_for_the_cpu():
    """The same after `init_process_group("nccl")`, for which "cuda:gloo" stands in."""
    run(2, rank_takes_steps_without_cpu, seconds=120, backend=LIKE_NCCL)


def test_a_prepared_loader_is_caught():
    """accelerate deals different samples to all processes."""
    with pytest.raises(RankFailedError, match="were given different samples"):
        run(2, rank_takes_steps, False, seconds=120)

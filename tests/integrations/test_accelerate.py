"""accelerate's own loop on sequences that ranks share, against one rank.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import os

import pytest
from accelerate import Accelerator
from distributed import LIKE_NCCL, RankFailedError, over_gloo, run
from steps import MAX_NORM, PER_STEP, SAMPLES, Steps, assert_same, make_loss, optimizer_of
from torch.utils.data import DataLoader

from ring_dilated_attention import ContextParallel


def rank_takes_steps(rank, world_size, own_loader):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    # never opened: torch.distributed is initialised
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    accelerator = Accelerator(cpu=True)
    parallel = ContextParallel(sharding="zigzag")
    model = make_loss(parallel)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    loader = DataLoader(SAMPLES, batch_size=PER_STEP)
    if not own_loader:
        loader = accelerator.prepare(loader)
    losses, norms = [], []
    for tokens in loader:
        loss = model(parallel.shard_batch({"tokens": tokens})["tokens"])
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parameters = {
        name: x.detach() for name, x in accelerator.unwrap_model(model).named_parameters()
    }
    assert_same(Steps(losses, norms, parameters))


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

"""Three steps of a small LongNetLM on one device, which every trainer must repeat on many."""

import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss

CONFIG = LongNetConfig((4, 16), (1, 2), vocab_size=20, num_layers=2, embed_dim=16, num_heads=4)
LEARNING_RATE, MAX_NORM = 2.0, 0.2
SAMPLES = torch.randint(0, 20, (6, 37), generator=torch.Generator().manual_seed(1))
PER_STEP = 2


class Steps(NamedTuple):
    """The loss of each step, and the norm of its gradient before it is clipped; the parameters after the last."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


def make_loss(parallel=None):
    torch.manual_seed(0)
    return NextTokenLoss(LongNetLM(CONFIG, parallel=parallel))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def environment(rank, world_size, **more):
    """As torchrun sets it, for libraries that look there."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, **more}
    # never opened: torch.distributed is initialised
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in variables.items()})


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def take_steps(model, optimizer, loss_of, backward, batches):
    """The steps of a loop of one's own, where `backward` computes the gradients of a loss."""
    losses, norms = [], []
    for batch in batches:
        loss = loss_of(batch)
        backward(loss)
        norms.append(float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Steps(losses, norms, {name: whole(x.detach()) for name, x in model.named_parameters()})


def steps_of_one_rank():
    model = make_loss()
    batches = SAMPLES.split(PER_STEP)
    steps = take_steps(model, optimizer_of(model), model, torch.Tensor.backward, batches)
    assert min(steps.norms) > MAX_NORM  # or clipping would not be seen
    return steps


def assert_same(found):
    """The same steps, but for the order of float32 sums."""
    expected = steps_of_one_rank()
    assert set(found.parameters) == set(expected.parameters)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=1e-4, atol=1e-5)

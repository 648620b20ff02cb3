"""The training loop. Every rank runs the loop, even a rank whose shard is empty. Only the first rank writes metrics."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..layers import MultiheadDilatedAttention
from ..models.longnet import LongNetBlock, LongNetLM, NextTokenLoss
from ..models.longnet_config import LongNetConfig
from ..models.saved_run import check_whole
from ..ranks.context import ContextParallel
from .agreement import together, values_of_all
from .checkpoint import load_checkpoint, save_checkpoint
from .machine import hardware, peak_resident_bytes, resident_bytes, versions
from .metrics import Metrics, Step
from .options import Hyperparameters
from .run import Run, initial_state, offering_older
from .run_report import make_record
from .scoring import gzip_bits_per_byte, held_out_bits_per_byte, tokens_of
from .stop_request import StopRequest

NATS_PER_BIT = math.log(2)
# A run is scored on the held-out bytes at most this many times. The last time is at the end of the run.
NUM_EVALUATIONS = 5
CLIP_NORM = 1.0  # larger gradients are scaled down to this norm
WEIGHT_DECAY = 0.1  # the weight decay of matrices; vectors are not decayed


class TrainingDiverged(ValueError):
    """The loss or a parameter is no longer finite."""


@contextmanager
def unseen(num_done: int) -> Iterator[Callable[[Step], None]]:
    yield lambda step: None


def train(
    run: Run,
    parallel: ContextParallel,
    stop: StopRequest,
    shown: Callable[[int], AbstractContextManager[Callable[[Step], None]]] = unseen,
) -> dict[str, Any]:
    """Train to the last step. After a request to stop, train only to the end of the current step. Returns the run's
    record.

    shown: a function that is called with the number of steps done so far. Its result is a context manager that shows
    progress, and that yields a function to call after each step.
    """
    options = run.hyperparameters
    torch.manual_seed(options.seed)
    is_cut = run.fsdp and parallel.world_size > 1  # a single rank holds all parameters
    model, loss_of = make_model(run, parallel, is_cut=is_cut)
    optimizers = make_optimizers(model, options)
    load(run, model, optimizers, parallel)
    state = together(parallel, partial(initial_state, run))
    # Without a checkpoint, let `Metrics` replace any file of metrics (`owner` is None), because the run that made the
    # file ended before its first checkpoint.
    owner = None if run.checkpoint is None else state["run"]
    make_metrics = partial(Metrics, run.folder, owner, state["step"], parallel.rank)
    eval_every = -(-options.total_steps // NUM_EVALUATIONS)
    is_stopping = False
    with together(parallel, make_metrics) as metrics, shown(state["step"]) as show:
        while state["step"] < options.total_steps and not is_stopping:
            num_positions = options.phase_of(state["step"]).num_positions
            began = time.perf_counter()
            nats = take_step(run, state["step"], loss_of, optimizers, parallel)
            of_ranks = values_of_all(parallel, (nats, resident_bytes(), stop.requested))
            all_nats, all_resident, all_requested = map(list, zip(*of_ranks, strict=True))
            bits = fmean(all_nats) / NATS_PER_BIT
            check_finite(math.isfinite(bits), f"the loss is {bits}", state["step"])
            is_stopping = any(all_requested)  # one rank's request stops all ranks at this step
            seconds = time.perf_counter() - began
            state["step"] += 1
            state["bits_per_byte"].append(bits)
            state["seconds"] += seconds
            is_last = state["step"] == options.total_steps
            held_out = None
            if state["step"] % eval_every == 0 and not is_last:
                held_out = held_out_bits_per_byte(model, run.document)
            speed = num_positions / seconds
            step = Step(state["run"], state["step"], bits, held_out, seconds, speed, all_resident)
            metrics.add(step)
            show(step)
            if state["step"] % run.save_every == 0 or is_last or is_stopping:
                check_parameters(model, parallel, state["step"])
                state |= trained_on(parallel)
                save_checkpoint(run.folder, state, model, optimizers, parallel, is_cut=is_cut)
    return scored_record(run, state, model)


def make_model(run: Run, parallel: ContextParallel, *, is_cut: bool) -> tuple[LongNetLM, nn.Module]:
    """Returns the model, and a module that computes its loss. The module's backward averages gradients over the ranks.

    is_cut: whether FSDP2 cuts the parameters over the ranks.
    """
    config, recomputes = run.hyperparameters.model_config(), run.activation_checkpointing
    if is_cut:
        model = sharded_model(config, parallel=parallel, activation_checkpointing=recomputes)
        return model, NextTokenLoss(model)
    model = LongNetLM(config, parallel=parallel, activation_checkpointing=recomputes)
    return model, average_gradients(NextTokenLoss(model), parallel)


def sharded_model(
    config: LongNetConfig, parallel: ContextParallel, *, activation_checkpointing: bool
) -> LongNetLM:
    """Make a model for `rda train --fsdp`: FSDP2 cuts parameters, gradients and optimiser state over the ranks.

    While the model is made, a rank holds the embedding, the head and one block whole. Of all other blocks the rank
    holds only its shards.
    """
    with torch.device("meta"):
        model = LongNetLM(
            config, parallel=parallel, activation_checkpointing=activation_checkpointing
        )
    # The constructors of an uncut model's modules draw random numbers. Draw as many here, so that `reset_ends` and
    # `reset_block` then draw the same parameters as without --fsdp.
    nn.Embedding(config.vocab_size, config.embed_dim)
    for _ in model.blocks:
        LongNetBlock(config, parallel, "auto")
    nn.Linear(config.embed_dim, config.vocab_size, bias=False)
    mesh = init_device_mesh("cpu", (parallel.world_size,))
    for end in (model.embedding, model.head, model.final_layernorm):
        end.to_empty(device="cpu")
    model.reset_ends()
    for block in model.each_block():
        model.reset_block(block.to_empty(device="cpu"))
        fully_shard(block, mesh=mesh)
    # Set reshard_after_forward. Otherwise, after a `loss` without a backward, every rank would keep the embedding, the
    # last LayerNorm and the head whole.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    # Let `loss`, like `forward`, gather the embedding, the last LayerNorm and the head.
    register_fsdp_forward_method(model, "loss")
    return model


def scored_record(run: Run, state: dict[str, Any], model: LongNetLM) -> dict[str, Any]:
    """The run's record. If the run is complete, its scores on the held-out bytes are added."""
    record = make_record(run.folder, state, sum(x.numel() for x in model.parameters()))
    if record["status"] == "complete":
        held_out = record["held_out_bits_per_byte"] = held_out_bits_per_byte(model, run.document)
        check_finite(math.isfinite(held_out), f"the loss is {held_out}", state["step"])
        record["gzip_bits_per_byte"] = gzip_bits_per_byte(run.document)
    return record


def take_step(
    run: Run,
    step: int,
    loss_of: nn.Module,
    optimizers: list[Optimizer],
    parallel: ContextParallel,
) -> float:
    """Train the model on the windows of one step. A window is a piece of the document; the model reads the windows as
    packed documents.

    Returns the mean loss in nats: over the windows of this rank if each rank reads windows of its own, otherwise over
    all windows.
    """
    options = run.hyperparameters
    phase = options.phase_of(step)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share_of_peak(options, step)
    windows = run.document.train_windows(options.seed, step, phase.length, phase.batch_size)
    sharing: AbstractContextManager[None] = nullcontext()
    # Split windows of --seq-len over all ranks. Leave shorter ones whole if each rank can get equally many,
    # because in a short window messages between ranks take longer than attention.
    if phase.length < options.seq_len and phase.batch_size % parallel.world_size == 0:
        num_local = len(windows) // parallel.world_size
        windows = windows[parallel.rank * num_local :][:num_local]
        tokens, sharing = tokens_of(windows), not_shared(loss_of)
    else:
        tokens = parallel.shard(tokens_of(windows))
    borders = torch.arange(0, len(windows) + 1, phase.length, dtype=torch.int32)
    # Run the backward in the block too, because with activation checkpointing the backward runs layers again.
    with sharing:
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
            loss = loss_of(tokens.long(), borders)
        nats = loss.item()
        loss.backward()
    nn.utils.clip_grad_norm_(loss_of.parameters(), CLIP_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return nats


@contextmanager
def not_shared(loss_of: nn.Module) -> Iterator[None]:
    """In this block each rank's model reads whole sequences, which are not split over ranks. Gradients are still
    averaged over ranks."""
    shared = {}
    for module in loss_of.modules():
        if isinstance(module, (LongNetLM, MultiheadDilatedAttention)):
            shared[module] = module.parallel
            module.parallel = None
    try:
        yield
    finally:
        for module, parallel in shared.items():
            module.parallel = parallel


def load(
    run: Run, model: nn.Module, optimizers: list[Optimizer], parallel: ContextParallel
) -> None:
    """Load the checkpoint from which the run resumes, if there is one."""
    if run.checkpoint is None:
        return
    checkpoint = run.checkpoint
    checked = offering_older(checkpoint)
    # Check all files of the checkpoint on every rank, because each host may have its own copy.
    together(parallel, checked(partial(check_whole, checkpoint)))
    together(parallel, checked(partial(load_checkpoint, checkpoint, model, optimizers)))


def make_optimizers(model: nn.Module, options: Hyperparameters) -> list[Optimizer]:
    """Returns Muon for the matrices of blocks, and AdamW for all other parameters.

    Each group of parameters has its peak learning rate under the key "peak".
    """
    matrices, others, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif ".blocks." in f".{name}":
            matrices.append(parameter)
        else:
            others.append(parameter)
    groups = [
        {"params": others, "weight_decay": WEIGHT_DECAY, "peak": options.learning_rate},
        {"params": vectors, "weight_decay": 0.0, "peak": options.learning_rate},
    ]
    of_matrices = {"params": matrices, "peak": options.muon_learning_rate}
    return [
        torch.optim.Muon([of_matrices], weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(groups, betas=(0.9, 0.95)),
    ]


def share_of_peak(options: Hyperparameters, step: int) -> float:
    """The learning rate of a step, as a fraction of the peak learning rate.

    The rate rises linearly in the warm-up. Then it falls to 5 % along a cosine. Progress along the cosine is counted in
    positions, because steps read different numbers of positions.
    """
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    first, now, last = map(
        options.positions_before, (options.warmup_steps, step, options.total_steps)
    )
    progress = (now - first) / max(1, last - first)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2


def average_gradients(loss_of: NextTokenLoss, parallel: ContextParallel) -> nn.Module:
    """Wrap the loss in DDP, which averages gradients over ranks. `loss_of` scales the loss of each rank so that this
    average is the gradient of the mean loss over all positions.

    Returns the module to call. On one rank this is `loss_of` itself.
    """
    wrapped = (
        loss_of
        if parallel.world_size == 1
        else DistributedDataParallel(loss_of, gradient_as_bucket_view=True)
    )
    # Run one backward and drop its gradients, because DDP orders its buckets (groups of gradients) anew after the first
    # backward. Otherwise a resumed run would add gradients in a different order from an uninterrupted run, and round
    # differently.
    borders = torch.tensor([0, 2 * parallel.world_size], dtype=torch.int32)
    tokens = parallel.shard(tokens_of(bytearray(2 * parallel.world_size)))
    wrapped(tokens.long(), borders).backward()
    wrapped.zero_grad()
    return wrapped


def check_finite(is_finite: bool, what: str, step: int) -> None:
    if not is_finite:
        raise TrainingDiverged(f"{what} at step {step}: start again with smaller learning rates")


def check_parameters(model: nn.Module, parallel: ContextParallel, step: int) -> None:
    """Raise TrainingDiverged on every rank if a parameter is not finite.

    The training loop calls this function before each checkpoint, so that no bad checkpoint replaces a good one. With
    --fsdp each rank holds a different part of the parameters, so all ranks must call this function.
    """
    is_finite = True
    for parameter in model.parameters():
        # Only a DTensor has `to_local`. Do not use isinstance, because importing the class DTensor takes a second.
        if hasattr(parameter, "to_local"):
            parameter = parameter.to_local()
        is_finite = is_finite and bool(parameter.isfinite().all())
    check_finite(all(values_of_all(parallel, is_finite)), "a parameter is not finite", step)


def trained_on(parallel: ContextParallel) -> dict[str, Any]:
    """What a record says about this rank's machine and about all ranks. All ranks must call this function."""
    return {
        "hardware": hardware() | {"threads_per_rank": torch.get_num_threads()},
        "versions": versions(),
        "ranks": values_of_all(
            parallel, {"rank": parallel.rank, "resident_peak": peak_resident_bytes()}
        ),
    }

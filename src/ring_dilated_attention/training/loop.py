"""The training loop. Every rank runs it, even one whose shard is empty. Only the first rank of the ring writes."""

import math
import time
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..models.longnet import LongNetLM, NextTokenLoss
from ..ranks.context import ContextParallel
from ..ranks.processes import recorded_waits
from .agreement import together, values_of_all
from .checkpoint import load_checkpoint, save_checkpoint
from .data import Document, baselines
from .machine import hardware, peak_resident_bytes, resident_bytes, versions
from .metrics import Metrics, Step, beside_the_bar, progress_bar
from .options import Hyperparameters
from .run import Run, initial_state, offering_older
from .run_report import make_record, planned_attention_bytes

NATS_PER_BIT = math.log(2)


class Stop(Protocol):
    @property
    def requested(self) -> bool: ...


class TrainingDiverged(ValueError):
    """The loss is no longer a number."""


def train(run: Run, parallel: ContextParallel, stop: Stop) -> dict[str, Any]:
    """Train to the last step, or to the first step boundary after a request to stop. Returns the run's record."""
    options = run.hyperparameters
    torch.manual_seed(options.seed)
    model = LongNetLM(options.model_config(), parallel=parallel, activation_checkpointing=run.activation_checkpointing)
    optimizer = make_optimizer(model, options)
    loss_of = average_gradients(NextTokenLoss(model), parallel)
    state = together(parallel, partial(initial_state, run))
    together(parallel, partial(load, run, model, optimizer))
    planned = planned_attention_bytes(options, parallel)
    measured, stopping = partial(trained_on, options, parallel, planned, resident_bytes()), False
    state = measured() | state
    writes = partial(Metrics, run.folder, state["run"], state["step"], parallel.rank, tensorboard=run.tensorboard)
    with (
        together(parallel, writes) as metrics,
        recorded_waits(parallel.ranks) as waits,
        progress_bar(options.steps, state["step"], parallel.rank) as bar,
    ):
        if parallel.rank == 0:  # not before: whatever is refused until here is one sentence
            bar.write(run.document.read, file=bar.fp)
        while state["step"] < options.steps and not stopping:
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, state["step"])
            loss = loss_of(shard(run.document.train_window(options.seed, state["step"]), parallel))
            nats = loss.item()
            check_finite(math.isfinite(nats), f"the loss is {nats}", state["step"])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
            optimizer.step()
            optimizer.zero_grad()

            waited = round(sum(wait.end - wait.start for wait in waits), 6)
            status = values_of_all(parallel, (waited, resident_bytes(), stop.requested))
            all_waited, all_resident, requests = map(list, zip(*status, strict=True))
            stopping = any(requests)  # so that all stop at the same step
            waits.clear()
            seconds = time.perf_counter() - began
            state["step"] += 1
            state["bits_per_byte"].append(nats / NATS_PER_BIT)
            state["step_seconds"].append(seconds)
            speed = options.seq_len / seconds
            step = Step(state["step"], nats, nats / NATS_PER_BIT, seconds, speed, all_waited, all_resident)
            metrics.add(step)
            bar.set_postfix_str(beside_the_bar(step, planned), refresh=False)
            bar.update()
            if state["step"] % run.save_every == 0 or state["step"] == options.steps or stopping:
                # A checkpoint with NaN would replace a good one.
                is_finite = all(bool(x.isfinite().all()) for x in model.parameters())
                check_finite(is_finite, "a parameter is not finite", state["step"])
                state |= measured()
                save = partial(save_checkpoint, run.folder, state, model, optimizer)
                together(parallel, save if parallel.rank == 0 else lambda: None)
    record = make_record(run.folder, state, sum(x.numel() for x in model.parameters()))
    if state["step"] == options.steps:
        held_out = record["held_out_bits_per_byte"] = held_out_bits_per_byte(model, run.document, parallel)
        check_finite(math.isfinite(held_out), f"the loss is {held_out}", state["step"])
        record["baselines"] = baselines(run.document) if parallel.rank == 0 else None
    return record


def load(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the checkpoint that the run goes on from, if there is one."""
    if run.checkpoint is not None:
        with offering_older(run.checkpoint):
            load_checkpoint(run.checkpoint, model, optimizer)


def make_optimizer(model: nn.Module, options: Hyperparameters) -> torch.optim.AdamW:
    matrices = [x for x in model.parameters() if x.dim() >= 2]
    vectors = [x for x in model.parameters() if x.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))


def learning_rate(options: Hyperparameters, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak: a function of the step alone."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return options.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def average_gradients(loss_of: NextTokenLoss, parallel: ContextParallel) -> nn.Module:
    """The loss under DDP. DDP averages gradients over ranks, and `loss_of` scales each rank's loss for that."""
    wrapped: nn.Module = loss_of
    if parallel.world_size > 1:
        wrapped = DistributedDataParallel(loss_of, gradient_as_bucket_view=True)
    # A rehearsal on a few bytes. After its first backward DDP orders its buckets anew. With more than two ranks this
    # changes the order in which gloo adds gradients: without a rehearsal a resumed run would get other bits.
    wrapped(shard(bytearray(2 * parallel.world_size), parallel)).backward()
    wrapped.zero_grad()
    return wrapped


def shard(window: bytearray, parallel: ContextParallel) -> Tensor:
    """This rank's shard of a sequence of bytes, (1, N_local) int64."""
    return parallel.shard(torch.frombuffer(window, dtype=torch.uint8)[None]).long()


def check_finite(is_finite: bool, what: str, step: int) -> None:
    if not is_finite:
        raise TrainingDiverged(f"{what} at step {step}: start again with a smaller --learning-rate")


@torch.no_grad()
def held_out_bits_per_byte(model: LongNetLM, document: Document, parallel: ContextParallel) -> float:
    """The mean loss of the held-out windows."""
    windows = (document.held_out_window(i) for i in range(document.num_held_out))
    losses = [model.loss(shard(window, parallel)).item() for window in windows]
    return sum(losses) / len(losses) / NATS_PER_BIT


def trained_on(options: Hyperparameters, parallel: ContextParallel, planned: int, before: int) -> dict[str, Any]:
    """What a record says about the machine and about each rank. It is the same on every rank."""
    own = {
        "rank": parallel.rank,
        "positions": len(parallel.positions(options.seq_len)),
        "resident_before": before,
        "resident_peak": peak_resident_bytes(),
        "planned_attention": planned,
    }
    machine = hardware() | {"threads_per_rank": torch.get_num_threads()}
    return {"hardware": machine, "versions": versions(), "ranks": values_of_all(parallel, own)}

"""`rda train --fsdp`: FSDP2 cuts parameters, gradients and optimiser state over the ranks, and each writes its part.

Every function here is called by all ranks, at the same step.
"""

import copy
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from ..models.longnet import LongNetBlock, LongNetLM
from ..models.longnet_config import LongNetConfig
from ..models.saved_run import SHARDS, identity
from ..ranks.context import ContextParallel
from .agreement import on_first, together, values_of_all
from .checkpoint import begin, finish, removed_on_failure, target_of, tensors_of
from .files import in_words


def sharded_model(config: LongNetConfig, parallel: ContextParallel, *, activation_checkpointing: bool) -> LongNetLM:
    """A model with parameters that are cut over the ranks. No rank ever holds more of it than its part and a block."""
    with torch.device("meta"):
        model = LongNetLM(config, parallel=parallel, activation_checkpointing=activation_checkpointing)
    # Draw what a model draws before it resets its parameters: so these are the same with and without --fsdp.
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
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # or its parameters are whole after `token_losses`
    for method in ("loss", "token_losses"):  # they gather the parameters of the ends, as `forward` does
        register_fsdp_forward_method(model, method)
    return model


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Writes checkpoints, of which each rank holds a part, while training goes on.

    A thread of each rank writes a copy. Until `finish` gives the folder its name, it counts as unfinished.
    """

    def __init__(self, run_folder: Path, parallel: ContextParallel) -> None:
        self.run_folder, self.parallel = run_folder, parallel
        # The threads have a group of their own: their messages must not mix with those of the steps.
        self._group = dist.new_group(backend="gloo", timeout=parallel.ranks.timeout)
        self._pending: tuple[Path, dict[str, Any], Future[Any]] | None = None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None or isinstance(error, ValueError):  # which all ranks raise alike
            self.finish()

    def start(self, state: dict[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin to write RUN/checkpoint-<step>."""
        self.finish()
        target = target_of(self.run_folder, state)
        if not (made := on_first(self.parallel, lambda: str(begin(target, state) or ""))):
            return
        writer = HuggingFaceStorageWriter(made, save_distributed=True)  # it flushes its file
        written, copies = Future[dict[str, Any]](), writer.stage(tensors_of(model, optimizers))
        self._pending = Path(made), copy.deepcopy(state), written
        # A daemon, unlike the thread of `async_save`: a rank that ends does not wait for one that hangs.
        Thread(target=self._write, args=(copies, writer, written), daemon=True).start()

    @property
    def is_written(self) -> bool:
        """Whether this rank's part is written, or never will be."""
        return self._pending is None or self._pending[2].done()

    def finish(self) -> None:
        """Wait until all ranks have written, and name the checkpoint. A Refusal on all if one rank could not."""
        if self._pending is None:
            return
        is_over, deadline = False, time.monotonic() + self.parallel.ranks.timeout.total_seconds()
        while not is_over:  # the exchange of values notices ranks that ended
            time.sleep(0.05)
            known = values_of_all(self.parallel, (self.is_written, time.monotonic() > deadline))
            is_over = all(is_written for is_written, _ in known) or any(is_late for _, is_late in known)
        (unfinished, state, written), self._pending = self._pending, None
        target = target_of(self.run_folder, state)
        with removed_on_failure(target, unfinished):
            own = together(self.parallel, partial(_result, target, written))
        files = {name: found for each in values_of_all(self.parallel, own) for name, found in each.items()}
        on_first(self.parallel, lambda: finish(target, unfinished, state, files))

    def _write(self, copies: dict[str, Any], writer: HuggingFaceStorageWriter, written: Future[dict[str, Any]]) -> None:
        """In a thread: write this rank's part. The result is the identities of its files."""
        try:
            save(copies, storage_writer=writer, process_group=self._group)
            shard = SHARDS.replace("*", f"{dist.get_rank() + 1:05d}-*")
            written.set_result({path.name: identity(path) for path in Path(writer.path).glob(shard)})
        except (Exception, CheckpointException) as error:  # noqa: BLE001  the main thread raises it
            written.set_exception(error)


def _result(target: Path, written: Future[dict[str, Any]]) -> dict[str, Any]:
    try:
        return written.result(timeout=0)
    except TimeoutError:
        raise RuntimeError(f"timed out: this rank did not write its part of {target} within --timeout") from None
    except CheckpointException as error:
        raise ValueError(f"{target} cannot be written: {in_words(next(iter(error.failures.values()))[0])}") from error

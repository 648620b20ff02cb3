"""`rda train --fsdp`: FSDP2 cuts parameters, gradients and optimiser state over the ranks, and each writes its part.

Every function here is called by all ranks, at the same step.
"""

import copy
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
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

from ..models.longnet import LongNetLM
from ..models.longnet_config import LongNetConfig
from ..models.saved_run import SHARDS, identity
from ..models.shards import why_failed
from ..ranks.context import ContextParallel
from .agreement import together, values_of_all
from .checkpoint import begin, finish, removed_on_failure, target_of, tensors_of

SECONDS_BETWEEN_LOOKS = 0.05


def sharded_model(config: LongNetConfig, parallel: ContextParallel, *, activation_checkpointing: bool) -> LongNetLM:
    """A model with parameters that are cut over the ranks. No rank ever holds more of it than its part and a block."""
    with torch.device("meta"):
        model = LongNetLM(config, parallel=parallel, activation_checkpointing=activation_checkpointing)
    mesh = init_device_mesh("cpu", (parallel.world_size,))
    for end in (model.embedding, model.head, model.final_layernorm):
        end.to_empty(device="cpu")
    model.reset_ends()
    for block in model.blocks:
        block.to_empty(device="cpu").reset_parameters(gain=model.gain)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # or its parameters are whole after `token_losses`
    for method in ("loss", "token_losses"):  # they gather the parameters of the ends, as `forward` does
        register_fsdp_forward_method(model, method)
    return model


class ShardWriter:
    """Writes checkpoints of which each rank holds a part, while training goes on.

    `start` copies the parts; a thread of each rank writes its copy; `finish` waits for all threads and gives the
    checkpoint its name. Until then its folder counts as unfinished, and a crash loses no other checkpoint.
    """

    def __init__(self, run_folder: Path, parallel: ContextParallel) -> None:
        self.run_folder, self.parallel = run_folder, parallel
        self._check_shared()
        # The threads have a group of their own: their messages must not mix with those of the steps.
        self._group = dist.new_group(backend="gloo")
        self._pending: tuple[Path, dict[str, Any], Future[Any]] | None = None

    def start(self, state: dict[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin to write RUN/checkpoint-<step>. A Refusal on all ranks if one of them cannot."""
        self.finish()
        target = target_of(self.run_folder, state)
        made = self._on_first(lambda: str(begin(target, state) or ""))
        if not made:
            return
        parts = tensors_of(model, optimizers)
        file_of = {name: number for number, part in enumerate(parts.values(), start=1) for name in part}
        writer = HuggingFaceStorageWriter(made, file_of, save_distributed=True)  # it flushes each file
        tensors = {name: x for part in parts.values() for name, x in part.items()}
        written, copies = Future[dict[str, Any]](), writer.stage(tensors)
        self._pending = Path(made), copy.deepcopy(state), written
        # A daemon, unlike the thread of `async_save`: a rank that ends does not wait for one that hangs.
        Thread(target=self._write, args=(target, copies, writer, written), daemon=True).start()

    @property
    def is_written(self) -> bool:
        """Whether this rank's part is written, or never will be."""
        return self._pending is None or self._pending[2].done()

    def finish(self) -> None:
        """Wait until all ranks have written, and make the checkpoint one. A Refusal on all if one rank could not."""
        if self._pending is None:
            return
        while not all(values_of_all(self.parallel, self.is_written)):  # it notices ranks that ended
            time.sleep(SECONDS_BETWEEN_LOOKS)
        (unfinished, state, written), self._pending = self._pending, None
        target = target_of(self.run_folder, state)
        with removed_on_failure(target, unfinished):
            parts = values_of_all(self.parallel, together(self.parallel, written.result))
        files = {name: found for part in parts for name, found in part.items()}
        self._on_first(partial(finish, target, unfinished, state, files))

    def _write(
        self, target: Path, copies: dict[str, Any], writer: HuggingFaceStorageWriter, written: Future[dict[str, Any]]
    ) -> None:
        """In a thread: write this rank's part. The result is the identities of its files."""
        try:
            save(copies, storage_writer=writer, process_group=self._group)
            shard = SHARDS.replace("*", f"{dist.get_rank() + 1:05d}-*")
            written.set_result({path.name: identity(path) for path in Path(writer.path).glob(shard)})
        except CheckpointException as error:
            written.set_exception(ValueError(f"{target} cannot be written: {why_failed(error)}"))
        except Exception as error:  # noqa: BLE001  the main thread raises it
            written.set_exception(error)

    def _check_shared(self) -> None:
        """Raise a Refusal on all ranks unless each sees a file that the first one makes in the run's folder."""
        name = f"seen-by-all-ranks-{secrets.token_hex(8)}"
        token = Path(self._on_first(lambda: (self.run_folder / name).touch() or name))

        def check() -> None:
            if not (self.run_folder / token).exists():
                rule = "--fsdp needs one folder that all hosts share, since each rank writes its part there"
                raise ValueError(f"{self.run_folder} is not the folder that the first rank sees: {rule}")

        try:
            together(self.parallel, check)
        finally:
            self._on_first((self.run_folder / token).unlink)

    def _on_first(self, action: Any) -> Any:
        """action()'s result on the first rank, which all ranks get."""
        found = together(self.parallel, action if self.parallel.rank == 0 else lambda: None)
        return values_of_all(self.parallel, found)[0]


@contextmanager
def shard_writer(run_folder: Path, parallel: ContextParallel) -> Iterator[ShardWriter]:
    """What it began to write is finished at the end of the block, also if all ranks refuse to go on."""
    writer = ShardWriter(run_folder, parallel)
    try:
        yield writer
    except ValueError:
        writer.finish()
        raise
    writer.finish()

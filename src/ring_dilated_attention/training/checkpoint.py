"""Writes the checkpoints of a run, whole or not at all, and loads them again.

`models/saved_run.py` describes the files. torch.distributed.checkpoint writes them into a folder with a temporary name.
The folder is then flushed to the disk, and renamed to the name of the checkpoint.

The newest two checkpoints of a run stay, in case one is damaged. Older checkpoints are deleted, file by file, if their
state says that this run made them.
"""

import json
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save
from torch.optim import AdamW, Muon, Optimizer

from ..models import saved_run
from ..models.rank_files import read_shards
from ..ranks.context import ContextParallel
from .agreement import on_first, together, values_of_all
from .files import flush, in_words
from .metrics import METRICS_FILE

MARK_FILE = "made-by-rda-train"  # a file in the folder of a checkpoint that is not finished
UNFINISHED = "unfinished-"
# The names of the tensors that each optimiser keeps for a parameter.
_FIELDS = {Muon: ("momentum_buffer",), AdamW: ("step", "exp_avg", "exp_avg_sq")}


def save_checkpoint(
    run_folder: Path,
    state: dict[str, Any],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    parallel: ContextParallel | None = None,
    *,
    is_cut: bool = False,
) -> Path:
    """Write RUN/checkpoint-<step>, and then remove older checkpoints. Returns the path.

    All ranks call this. is_cut: whether FSDP2 cuts the tensors over the ranks. If so, each rank writes its shards of
    the tensors. Otherwise the first rank writes all tensors.

    Raises ValueError if the checkpoint cannot be written. No older checkpoint is removed then.
    """
    parallel = parallel or ContextParallel()
    target = run_folder / f"checkpoint-{state['step']:06d}"
    token = on_first(parallel, lambda: secrets.token_hex(4))
    unfinished = target.with_name(f"{UNFINISHED}{target.name}-{token}")
    tensors = tensors_of(model, optimizers)
    write = partial(_write, target, unfinished, tensors, parallel.rank, is_cut=is_cut)
    with _removed_on_failure(target, unfinished):
        on_first(parallel, partial(_begin, target, unfinished, state["run"]))
        files: dict[str, Any] = {}
        for files_of_rank in values_of_all(parallel, together(parallel, write)):
            files |= files_of_rank
        on_first(parallel, lambda: _finish(target, unfinished, state, files))
    return target


def tensors_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name: parameters such as "head.weight", and for each parameter the optimiser's
    state, such as "exp_avg/head.weight"."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for field, tensor in optimizer.state.get(parameter, {}).items():
                tensors[f"{field}/{name}"] = tensor
    return tensors


def _begin(target: Path, unfinished: Path, run: str) -> None:
    """Make the folder in which a checkpoint is written. Raises ValueError if the checkpoint exists already."""
    if target.exists():
        raise ValueError(f"{target} is in the way: move it away")
    unfinished.mkdir(parents=True)
    (unfinished / MARK_FILE).write_text(run)


def _write(
    target: Path, unfinished: Path, tensors: dict[str, Tensor], rank: int, *, is_cut: bool
) -> dict[str, Any]:
    """Write this rank's shards of the tensors. If the tensors are not cut, the first rank writes all of them.

    Returns the size and the digest of the file that this rank wrote, by the file's name; {} if it wrote none.
    """
    if rank > 0 and not is_cut:
        return {}
    writer = HuggingFaceStorageWriter(str(unfinished), save_distributed=True)
    try:
        with warnings.catch_warnings():
            # Hide torch's warning that `save` does not use torch.distributed: with no_dist=True this is intended.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(tensors, storage_writer=writer, no_dist=not is_cut)
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        why = failure.strerror if isinstance(failure, OSError) else in_words(failure)
        raise ValueError(f"{target} cannot be written: {why}") from error
    pattern = saved_run.SHARDS.replace("*", f"{rank + 1:05d}-*")
    return {path.name: saved_run.identity(path) for path in unfinished.glob(pattern)}


def _finish(target: Path, unfinished: Path, state: dict[str, Any], files: dict[str, Any]) -> None:
    """Write the state, flush all files to the disk, give the checkpoint its name, and remove older checkpoints.

    files: the size and digest of each file of tensors, by the file's name.
    """
    (unfinished / saved_run.STATE_FILE).write_text(signed(files, state))
    # Flush the metrics too, because a run cannot be resumed if a crash of the host leaves its file of metrics empty.
    for path in (*target.parent.glob(METRICS_FILE), *unfinished.iterdir(), unfinished):
        flush(path)
    unfinished.rename(target)
    (target / MARK_FILE).unlink()
    flush(target)
    flush(target.parent)
    _remove_superfluous(target, state["run"])


@contextmanager
def _removed_on_failure(target: Path, unfinished: Path) -> Iterator[None]:
    """If the block raises, remove the unfinished folder. An OSError becomes a ValueError that names the checkpoint."""
    try:
        yield
    except BaseException as error:
        _remove(unfinished)
        if isinstance(error, OSError):
            raise ValueError(f"{target} cannot be written: {error.strerror}") from error
        raise


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Load parameters and the optimisers' state from a checkpoint, after `saved_run.check_whole` has accepted it.

    Raises ValueError if the checkpoint lacks a tensor, or has it in a different shape. In that case nothing is changed.
    """
    parameters = dict(model.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    expected: dict[str, Tensor] = dict(parameters)
    # For each tensor of the optimisers' state, by its name: the optimiser, the parameter and the field.
    places = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for field in _FIELDS[type(optimizer)]:
                    name = f"{field}/{names[parameter]}"
                    expected[name] = torch.zeros(()) if field == "step" else parameter
                    places[name] = (optimizer, parameter, field)
    tensors = read_shards(checkpoint, expected)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    for name, (optimizer, parameter, field) in places.items():
        optimizer.state[parameter][field] = tensors[name]


def signed(files: dict[str, Any], state: dict[str, Any]) -> str:
    content = {"made_by": saved_run.MAKER, "state": state, "files": files}
    return json.dumps(content | {"sha256": saved_run.digest(content)})


def _is_of_run(checkpoint: Path, run: str) -> bool:
    with suppress(ValueError):
        return saved_run.read_state(checkpoint).get("run") == run
    return False


def _remove_superfluous(target: Path, run: str) -> None:
    """Remove unfinished checkpoints. Of this run's checkpoints before `target`, keep only the newest."""
    step = saved_run.step_of(target)
    older = [
        path for path in saved_run.find_checkpoints(target.parent) if saved_run.step_of(path) < step
    ]
    ours = [path for path in older if _is_of_run(path, run)]
    for path in ours[1:]:
        _remove(path)
    for path in target.parent.glob(f"{UNFINISHED}checkpoint-*"):
        if (path / MARK_FILE).is_file():
            _remove(path)


def _remove(folder: Path) -> None:
    """Remove the files of a checkpoint, finished or not. Then remove its folder, if it holds nothing else."""
    with suppress(OSError):
        for path in folder.glob(saved_run.SHARDS):
            path.unlink(missing_ok=True)
        # Remove MARK_FILE last. If the removal is interrupted, MARK_FILE tells the next removal that the folder is an
        # unfinished checkpoint.
        for name in (saved_run.STATE_FILE, MARK_FILE):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()

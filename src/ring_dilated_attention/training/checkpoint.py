"""Checkpoints of a run, written whole or not at all and loaded again (`models/saved_run.py` describes the files).

A checkpoint is written under another name, flushed to the disk, and renamed. The newest two of a run stay, in case one
is damaged. Older ones go, file by file, if their state says that this run made them.
"""

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from ..models import saved_run
from .files import flush, replaced
from .metrics import METRICS_FILE

MARK_FILE = "made-by-rda-train"  # is in a folder that is not finished yet, and holds the name of the run
_UNFINISHED = "unfinished-"
_FIELDS = {Muon: ("momentum_buffer",), AdamW: ("step", "exp_avg", "exp_avg_sq")}  # of an optimiser's state


def save_checkpoint(run_folder: Path, state: dict[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]) -> Path:
    """Write RUN/checkpoint-<step>, then remove older ones. A ValueError if it cannot be written: nothing is removed."""
    target = target_of(run_folder, state)
    if (unfinished := begin(target, state)) is None:
        return target
    files = {}
    with removed_on_failure(target, unfinished):
        tensors = tensors_of(model, optimizers)
        for name, are_moments in ((saved_run.MODEL_FILE, False), (saved_run.OPTIMIZER_FILE, True)):
            with replaced(unfinished / name) as path:
                save_file({key: x for key, x in tensors.items() if ("/" in key) == are_moments}, path)
            files[name] = saved_run.identity(unfinished / name)
    finish(target, unfinished, state, files)
    return target


def target_of(run_folder: Path, state: dict[str, Any]) -> Path:
    return run_folder / f"checkpoint-{state['step']:06d}"


def begin(target: Path, state: dict[str, Any]) -> Path | None:
    """Make the folder that becomes a checkpoint. None if this run has made the checkpoint already."""
    if target.exists():
        if not _is_of_run(target, state["run"]):
            raise ValueError(f"{target} is in the way, and this run did not make it: move it away")
        return None  # the run was resumed, and stopped before its first step
    unfinished = target.with_name(f"{_UNFINISHED}{target.name}-{secrets.token_hex(4)}")
    with removed_on_failure(target, unfinished):
        unfinished.mkdir(parents=True)
        (unfinished / MARK_FILE).write_text(state["run"])
    return unfinished


def tensors_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """What a checkpoint holds: parameters by name, and the optimisers' state as "<field>/<parameter>"."""
    moments = {
        f"{field}/{name}": x
        for name, parameter in model.named_parameters()
        for optimizer in optimizers
        for field, x in optimizer.state.get(parameter, {}).items()
    }
    return {name: x.detach() for name, x in model.named_parameters()} | moments


def finish(target: Path, unfinished: Path, state: dict[str, Any], files: dict[str, Any]) -> None:
    """Give a checkpoint its name, and remove older ones. files: the identities of the files with its tensors."""
    with removed_on_failure(target, unfinished):
        (unfinished / saved_run.STATE_FILE).write_text(_signed(files, state))
        # The metrics as well: after a crash of the host a run without them would not go on.
        for path in (*target.parent.glob(METRICS_FILE), *unfinished.iterdir(), unfinished):
            flush(path)
        unfinished.rename(target)
        (target / MARK_FILE).unlink()
        flush(target)
        flush(target.parent)
    _remove_superfluous(target, state["run"])


@contextmanager
def removed_on_failure(target: Path, unfinished: Path) -> Iterator[None]:
    """Remove what is unfinished if the block raises. An error of the disk is a ValueError that names the checkpoint."""
    try:
        yield
    except BaseException as error:
        _remove(unfinished)
        if isinstance(error, (OSError, SafetensorError)):
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ValueError(f"{target} cannot be written: {why}") from error
        raise


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Load parameters, and the optimisers' state if any are given, from a checkpoint that `saved_run.check_whole` has
    not refused. A ValueError if a file is unfit: nothing changes."""
    by_name: dict[str, Tensor] = dict(model.named_parameters())
    name_of = {x: name for name, x in by_name.items()}
    places = {
        f"{field}/{name_of[x]}": (optimizer, x)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for x in group["params"]
        for field in _FIELDS[type(optimizer)]
    }
    moments = {key: torch.zeros(()) if key.startswith("step/") else x for key, (_, x) in places.items()}
    found = _load(checkpoint, by_name | moments)
    for key in moments:
        x = found[key]
        if key.startswith("step/") and x.item() != saved_run.step_of(checkpoint):
            raise ValueError(f"{checkpoint} is damaged: {key!r} is {x.item():g}, not the run's step")
        if key.startswith("exp_avg_sq/") and bool((local_of(x) < 0).any()):
            raise ValueError(f"{checkpoint} is damaged: {key!r} is a mean of squares below 0")
    with torch.no_grad():
        for name, parameter in by_name.items():
            parameter.copy_(found[name])
        for key, (optimizer, parameter) in places.items():
            optimizer.state[parameter][key.partition("/")[0]] = found[key]


def _load(checkpoint: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of these names, or this rank's parts of them. Names of the optimisers' tensors have a "/"."""
    from ..models.rank_files import described_shards, read_shards

    try:
        found = described_shards(checkpoint)
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"{checkpoint} cannot be read: {error}") from error
    if not any("/" in name for name in expected):
        found = {name: x for name, x in found.items() if "/" not in name}
    for names, what in ((expected.keys() - found.keys(), "lacks"), (found.keys() - expected.keys(), "also has")):
        if names:
            misfit = f"{what} {len(names)} tensors, {min(names)!r} first"
            raise ValueError(f"{checkpoint} does not fit the model: it {misfit}")
    for name, x in found.items():
        theirs, ours = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (x, expected[name]))
        if theirs != ours:
            raise ValueError(f"{checkpoint} does not fit the model: {name!r} is {theirs}, and the model's is {ours}")
    found = read_shards(checkpoint, expected)
    for name, x in found.items():
        if x.is_floating_point() and not bool(local_of(x).isfinite().all()):
            raise ValueError(f"{checkpoint} cannot be used: {name!r} has numbers that are not finite")
    return found


def local_of(x: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut over the ranks, or the whole of another."""
    return x.to_local() if hasattr(x, "to_local") else x


def _signed(files: dict[str, Any], state: dict[str, Any]) -> str:
    content = {"made_by": saved_run.MAKER, "state": state, "files": files}
    return json.dumps(content | {"sha256": saved_run.digest(content)})


def _is_of_run(checkpoint: Path, run: str) -> bool:
    with suppress(ValueError):
        return saved_run.read_state(checkpoint).get("run") == run
    return False


def _remove_superfluous(target: Path, run: str) -> None:
    """Remove unfinished checkpoints, and this run's checkpoints older than `target`, except the newest of them."""
    step = saved_run.step_of(target)
    older = [path for path in saved_run.find_checkpoints(target.parent) if saved_run.step_of(path) < step]
    for path in [path for path in older if _is_of_run(path, run)][1:]:
        _remove(path)
    for path in target.parent.glob(f"{_UNFINISHED}checkpoint-*"):
        if (path / MARK_FILE).is_file():
            _remove(path)


def _remove(folder: Path) -> None:
    """Remove the files of a checkpoint, finished ones or not, and its folder if nothing else is in it."""
    with suppress(OSError):
        names = [saved_run.SHARDS, saved_run.MODEL_FILE, saved_run.OPTIMIZER_FILE, saved_run.STATE_FILE]
        begun = ["unfinished-*", ".tmp*"] if (folder / MARK_FILE).is_file() else []  # by `replaced` and safetensors
        for path in (path for name in (*names, *begun, MARK_FILE) for path in folder.glob(name)):  # the mark last
            path.unlink(missing_ok=True)
        folder.rmdir()

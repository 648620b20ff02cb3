"""Checkpoints of a run, written whole or not at all and loaded again (`models/saved_run.py` describes the files).

A checkpoint is written under another name, flushed to the disk, and renamed. The newest two of a run stay, so that
there is another if the newest is damaged. Older ones are removed, file by file, if their state says that this run made
them.
"""

import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from ..models.saved_run import (
    MAKER,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    check_whole,
    digest,
    find_checkpoints,
    identity,
    read_state,
    step_of,
)
from .files import flush, replaced

MARK_FILE = "made-by-rda-train"  # in what is unfinished, and says by which run
_UNFINISHED = "unfinished-"


def save_checkpoint(run_folder: Path, state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> Path:
    """Write RUN/checkpoint-<state["step"]> of the run state["run"], then remove what it makes superfluous.

    Raises:
        ValueError: if it cannot be written. The older checkpoints are there still.
    """
    target = run_folder / f"checkpoint-{state['step']:06d}"
    if target.exists():
        if not _is_of_run(target, state["run"]):
            raise ValueError(f"{target} is in the way, and this run did not make it: move it away")
        return target  # a run that was resumed and stopped before its first step
    unfinished = run_folder / f"{_UNFINISHED}{target.name}-{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        (unfinished / MARK_FILE).write_text(state["run"])
        parameters = {name: x.detach() for name, x in model.named_parameters()}
        moments = {
            f"{field}/{name}": x
            for name, parameter in model.named_parameters()
            for field, x in optimizer.state.get(parameter, {}).items()
        }
        for name, tensors in ((MODEL_FILE, parameters), (OPTIMIZER_FILE, moments)):
            with replaced(unfinished / name) as path:
                save_file(tensors, path)
        (unfinished / STATE_FILE).write_text(_signed(unfinished, state))
        for path in (*unfinished.iterdir(), unfinished):
            flush(path)
        unfinished.rename(target)
        (target / MARK_FILE).unlink()
        flush(target)
        flush(run_folder)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{target} cannot be written: {why}") from error
    finally:
        _remove(unfinished)
    _remove_superfluous(target, state["run"])
    return target


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Put the saved parameters and optimiser state in place, once all of them turn out to fit.

    Raises:
        ValueError: if a file is damaged or does not fit the model. Nothing was changed then.
    """
    check_whole(checkpoint)
    by_name: dict[str, Tensor] = dict(model.named_parameters())
    parameters = _load(checkpoint / MODEL_FILE, by_name)
    expected = {f"{field}/{name}": x for name, x in by_name.items() for field in ("exp_avg", "exp_avg_sq")}
    expected |= {f"step/{name}": torch.zeros((), dtype=torch.float32) for name in by_name}
    moments = _load(checkpoint / OPTIMIZER_FILE, expected)
    for key, x in moments.items():
        if key.startswith("step/") and x.item() != step_of(checkpoint):
            raise ValueError(f"{checkpoint / OPTIMIZER_FILE} is damaged: {key!r} is {x.item():g}, not the run's step")
        if key.startswith("exp_avg_sq/") and bool((x < 0).any()):
            raise ValueError(f"{checkpoint / OPTIMIZER_FILE} is damaged: {key!r} is a mean of squares below 0")
    with torch.no_grad():
        for name, x in parameters.items():
            by_name[name].copy_(x)
        for key, x in moments.items():
            field, _, name = key.partition("/")
            optimizer.state[by_name[name]][field] = x


def _load(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, whose names, shapes and dtypes must be the expected ones."""
    try:
        found: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for names, what in ((expected.keys() - found.keys(), "lacks"), (found.keys() - expected.keys(), "has besides")):
        if names:
            raise ValueError(f"{path} does not fit the model: it {what} {len(names)} tensors, {min(names)!r} first")
    for name, x in found.items():
        ours = expected[name]
        if (x.shape, x.dtype) != (ours.shape, ours.dtype):
            raise ValueError(
                f"{path} does not fit the model: {name!r} is {x.dtype} {tuple(x.shape)}, and the model's is "
                f"{ours.dtype} {tuple(ours.shape)}"
            )
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise ValueError(f"{path} holds no numbers that can be used: {name!r} is not finite")
    return found


def _signed(folder: Path, state: dict[str, Any]) -> str:
    """What state.json holds."""
    files = {name: identity(folder / name) for name in (MODEL_FILE, OPTIMIZER_FILE)}
    content = {"made_by": MAKER, "state": state, "files": files}
    return json.dumps(content | {"sha256": digest(content)})


def _is_of_run(checkpoint: Path, run: str) -> bool:
    with suppress(ValueError):
        return read_state(checkpoint).get("run") == run
    return False


def _remove_superfluous(target: Path, run: str) -> None:
    """Checkpoints of this run but for `target` and the one before it, and what was never finished."""
    older = [path for path in find_checkpoints(target.parent) if step_of(path) < step_of(target)]
    for path in [path for path in older if _is_of_run(path, run)][1:]:
        _remove(path)
    for path in target.parent.glob(f"{_UNFINISHED}checkpoint-*"):
        if (path / MARK_FILE).is_file():
            _remove(path)


def _remove(folder: Path) -> None:
    """The files of a checkpoint, and its folder unless there is something else in it."""
    with suppress(OSError):
        for name in (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, MARK_FILE):  # the mark last
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()

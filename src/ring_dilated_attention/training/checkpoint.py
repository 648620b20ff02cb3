"""Checkpoints: safetensors and JSON, never a pickle, either whole or absent, and verified before anything is used.

    RUN/checkpoint-000060/model.safetensors       the parameters, by name
                          optimizer.safetensors   AdamW's state, as "<field>/<parameter>"
                          state.json              everything else, and the digests of all three

A checkpoint is written under another name, flushed to the disk, and renamed. The newest two of a run stay, so that one
that is damaged has one before it; older ones go, file by file, where their state says that this run made them.
"""

import hashlib
import json
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import flush, replaced

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

MAKER = "rda train"
MODEL_FILE, OPTIMIZER_FILE, STATE_FILE = "model.safetensors", "optimizer.safetensors", "state.json"
MARK_FILE = "made-by-rda-train"  # in what is unfinished, and says by which run
_NAME = re.compile(r"checkpoint-([0-9]+)")
_UNFINISHED = "unfinished-"


def find_checkpoints(run_folder: Path) -> list[Path]:
    """The checkpoints of a run by their names, the newest first."""
    found = [path for path in run_folder.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def find_checkpoint(run_folder: Path) -> Path | None:
    """The newest checkpoint of a run, or None."""
    return next(iter(find_checkpoints(run_folder)), None)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(checkpoint.name.partition("-")[2])


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of its run.

    Raises:
        ValueError: if it is not as it was written, in words that name the file and what is wrong.
    """
    return dict(_read_state_file(checkpoint)["state"])


def check_whole(checkpoint: Path) -> dict[str, Any]:
    """`read_state`, where the other files are as they were written, too.

    Raises:
        ValueError: as of `read_state`.
    """
    content = _read_state_file(checkpoint)
    for name in (MODEL_FILE, OPTIMIZER_FILE):
        expected, path = content["files"].get(name), checkpoint / name
        try:
            found = _identity(path)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        if found != expected:
            was = expected if isinstance(expected, dict) else {}
            why = "its sha256 is another"
            if found["bytes"] != was.get("bytes"):
                why = f"it has {found['bytes']:,} bytes, and {was.get('bytes')} were written"
            raise ValueError(f"{path} is damaged: {why}")
    return dict(content["state"])


def save_checkpoint(run_folder: Path, state: dict[str, Any], model: "nn.Module", optimizer: "Optimizer") -> Path:
    """Write RUN/checkpoint-<state["step"]>, then remove what it makes superfluous.

    Args:
        state: says by its "run" which run this is.

    Raises:
        ValueError: if it cannot be written. What there was before is there still.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

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
        for name, tensors in ((MODEL_FILE, parameters), (OPTIMIZER_FILE, _optimizer_tensors(model, optimizer))):
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


def load_checkpoint(checkpoint: Path, model: "nn.Module", optimizer: "Optimizer") -> None:
    """Put the saved parameters and optimiser state in place, once all of them turn out to fit.

    Raises:
        ValueError: if a file is damaged or does not fit the model. Nothing was changed then.
    """
    import torch

    check_whole(checkpoint)
    by_name = dict(model.named_parameters())
    parameters = _load(checkpoint / MODEL_FILE, dict(by_name))
    expected: dict[str, Tensor] = {}
    for name, parameter in by_name.items():
        expected |= {f"{field}/{name}": parameter for field in ("exp_avg", "exp_avg_sq")}
        expected[f"step/{name}"] = torch.zeros((), dtype=torch.float32)
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


def _load(path: Path, expected: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """The tensors of a file, whose names, shapes and dtypes must be the expected ones."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

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


def _optimizer_tensors(model: "nn.Module", optimizer: "Optimizer") -> "dict[str, Tensor]":
    tensors = {}
    for name, parameter in model.named_parameters():
        for field, x in optimizer.state.get(parameter, {}).items():
            tensors[f"{field}/{name}"] = x
    return tensors


def _signed(folder: Path, state: dict[str, Any]) -> str:
    """What state.json holds."""
    content = {
        "made_by": MAKER,
        "state": state,
        "files": {name: _identity(folder / name) for name in (MODEL_FILE, OPTIMIZER_FILE)},
    }
    return json.dumps(content | {"sha256": _digest(content)})


def _read_state_file(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / STATE_FILE
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("made_by") != MAKER:
        raise ValueError(f"{path} was not made by {MAKER}")
    given = content.pop("sha256", None)
    if given != _digest(content):
        raise ValueError(f"{path} is damaged: its sha256 is another than it says")
    if not all(isinstance(content.get(part), dict) for part in ("state", "files")):
        raise ValueError(f"{path} is damaged: it has no state, or no files")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _identity(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _is_of_run(checkpoint: Path, run: str) -> bool:
    try:
        return read_state(checkpoint).get("run") == run
    except ValueError:
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

"""Checkpoints: safetensors and JSON, never a pickle, and either whole or absent.

    RUN/checkpoint-000060/model.safetensors       the parameters, by name
                          optimizer.safetensors   AdamW's state, as "<field>/<parameter>"
                          state.json              everything else

A checkpoint is written under another name, flushed to the disk, and renamed. The one before it goes only afterwards.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = "unfinished-"
STATE_FILE = "state.json"


def find_checkpoint(run_folder: Path) -> Path | None:
    """The newest checkpoint of a run, or None."""
    found = [path for path in run_folder.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return max(found, key=lambda path: int(path.name.split("-")[1]), default=None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / STATE_FILE
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a checkpoint's state: {error}") from error


def save_checkpoint(run_folder: Path, state: dict[str, Any], model: "nn.Module", optimizer: "Optimizer") -> Path:
    """Write RUN/checkpoint-<state["step"]>, then remove the older ones."""
    from safetensors.torch import save_file

    target = run_folder / f"checkpoint-{state['step']:06d}"
    if target.exists():  # a run that was resumed and stopped before its first step
        return target
    unfinished = run_folder / f"{_UNFINISHED}{target.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file({name: x.detach() for name, x in model.named_parameters()}, unfinished / "model.safetensors")
    save_file(_optimizer_tensors(model, optimizer), unfinished / "optimizer.safetensors")
    (unfinished / STATE_FILE).write_text(json.dumps(state))
    for path in (*unfinished.iterdir(), unfinished):
        _flush(path)
    unfinished.rename(target)
    _flush(run_folder)
    for path in run_folder.iterdir():
        if path != target and (_NAME.fullmatch(path.name) or path.name.startswith(_UNFINISHED)):
            shutil.rmtree(path)
    return target


def load_checkpoint(checkpoint: Path, model: "nn.Module", optimizer: "Optimizer") -> None:
    """Put the saved parameters and optimiser state in place.

    Raises:
        ValueError: if a file is damaged or does not fit the model.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        parameters = load_file(checkpoint / "model.safetensors")
        moments = load_file(checkpoint / "optimizer.safetensors")
        model.load_state_dict(parameters, strict=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"{checkpoint} cannot be loaded: {error}") from error
    by_name = dict(model.named_parameters())
    with torch.no_grad():
        for key, x in moments.items():
            field, _, name = key.partition("/")
            optimizer.state[by_name[name]][field] = x


def _optimizer_tensors(model: "nn.Module", optimizer: "Optimizer") -> "dict[str, Tensor]":
    tensors = {}
    for name, parameter in model.named_parameters():
        for field, x in optimizer.state.get(parameter, {}).items():
            tensors[f"{field}/{name}"] = x
    return tensors


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

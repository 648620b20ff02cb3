"""Reads the files of `rda train`: safetensors and JSON, never a pickle, verified before any of them is used.

    RUN/checkpoint-000060/shard-00001-model-00001-of-00001.safetensors   the parameters by name, and the optimisers'
                                                                         state as "<field>/<parameter>"
                          state.json                                     everything else, and the digests of all files

torch.distributed.checkpoint writes and reads the tensors (`rank_files.py`). With --fsdp each rank writes a file with
its own part of every tensor.

This module does not import torch.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAKER = "rda train"
STATE_FILE = "state.json"
SHARDS = "shard-*.safetensors"
_NAME = re.compile(r"checkpoint-([0-9]+)")


def find_checkpoints(run_folder: Path) -> list[Path]:
    """The checkpoint folders of a run, found by their names, newest first."""
    checkpoints = [path for path in run_folder.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(checkpoints, key=step_of, reverse=True)


def find_checkpoint(run_folder: Path) -> Path | None:
    """The newest checkpoint of a run, or None."""
    return next(iter(find_checkpoints(run_folder)), None)


def newest_checkpoint(run_folder: Path) -> Path:
    checkpoint = find_checkpoint(run_folder)
    if checkpoint is None:
        raise ValueError(
            f"{run_folder}: there is no checkpoint in this folder; pass the folder of a run of rda train"
        )
    return checkpoint


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a run, from the state.json of a checkpoint. Raises ValueError if this file is missing or damaged."""
    return dict(_read_state_file(checkpoint)["state"])


def check_whole(checkpoint: Path) -> dict[str, Any]:
    """Verify all files of a checkpoint by their sizes and digests. Returns the state of the run, as in `read_state`.

    Raises ValueError, with the file's name, if a file is missing or damaged, or does not belong to the checkpoint.
    """
    content = _read_state_file(checkpoint)
    # Refuse further safetensors files, because torch would read every safetensors file in the folder.
    for path in sorted(checkpoint.glob("*.safetensors")):
        if path.name not in content["files"]:
            raise ValueError(f"{path} is no file of this checkpoint: move it away")
    for name in sorted(content["files"]):
        path = checkpoint / name
        if _read(path, identity) != content["files"][name]:
            raise ValueError(f"{path} is damaged: its size or sha256 is not the recorded one")
    return dict(content["state"])


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _read_state_file(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / STATE_FILE
    written = _read(path, Path.read_bytes)
    try:
        content = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("made_by") != MAKER:
        raise ValueError(f"{path} was not made by {MAKER}")
    if content.pop("sha256", None) != digest(content):
        raise ValueError(f"{path} is damaged: its sha256 differs from the one written in it")
    if not all(isinstance(content.get(name), dict) for name in ("state", "files")):
        raise ValueError(f"{path} is damaged: it has no state, or no files")
    return content


def digest(content: dict[str, Any]) -> str:
    """The sha256 of the content of a state.json, without the entry "sha256"."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def identity(path: Path) -> dict[str, Any]:
    """The size of a file in bytes, and its sha256."""
    with open(path, "rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }

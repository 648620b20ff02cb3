"""A run: its hyperparameters, its document and its folder. Bad requests are refused here, before torch is imported."""

import argparse
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..models.saved_run import (
    STATE_FILE,
    find_checkpoint,
    read_state,
    step_of,
)
from .data import Document, load_document
from .files import check_mine, mentions
from .options import Hyperparameters, flag, resolve
from .run_folder import LOCK_FILE

RECORD_FILE = "record.json"  # the file that a run leaves at its end
# The options that must be the same on all ranks, in addition to the hyperparameters.
ALIKE = ("save_every", "activation_checkpointing", "fsdp")
# The entries that a run's state has in every checkpoint.
_STATE = {
    "run",
    "step",
    "hyperparameters",
    "document",
    "bits_per_byte",
    "seconds",
    "hardware",
    "versions",
    "ranks",
}


@dataclass(frozen=True)
class Run:
    """What to train, and in which folder. checkpoint: the checkpoint from which the run resumes; None for a new run."""

    hyperparameters: Hyperparameters
    document: Document
    folder: Path
    checkpoint: Path | None = None
    save_every: int = 30
    activation_checkpointing: bool = False
    fsdp: bool = False


def prepare(arguments: argparse.Namespace) -> Run:
    """The run that the command line asks for. Raises a ValueError that tells the user why the run is refused."""
    folder = arguments.run_folder or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    checkpoint = find_checkpoint(folder)
    state = None
    if checkpoint is None:
        options = resolve(arguments)
        check_mine(folder / RECORD_FILE, lambda file: False, "this run")
    else:
        state, before = _read_checkpoint(checkpoint)
        options = resolve(arguments, before)
        check_mine(folder / RECORD_FILE, mentions(state["run"]), "this run")
    document = load_document(options.data, options.seq_len, options.held_out_bytes)
    if state is not None:
        _check_same_document(document, state["document"])
    choices = {name: getattr(arguments, name) for name in ALIKE}
    return Run(options, document, folder, checkpoint, **choices)


def initial_state(run: Run) -> dict[str, Any]:
    """The state with which training begins: the state in the run's checkpoint, or a new run's state. A state is
    everything in a checkpoint except tensors.
    """
    if run.checkpoint is not None:
        return read_state(run.checkpoint)
    return {
        "run": secrets.token_hex(16),
        "step": 0,
        "hyperparameters": asdict(run.hyperparameters),
        "document": run.document.identity(),
        "bits_per_byte": [],
        "seconds": 0.0,
    }


def fingerprint(run: Run) -> dict[str, str]:
    """The values that must be the same on all ranks, by name, as texts. The document is compared by its content, not by
    its path."""
    fields = {
        flag(name): str(value)
        for name, value in asdict(run.hyperparameters).items()
        if name != "data"
    }
    fields |= {flag(name): str(getattr(run, name)) for name in ALIKE}
    fields["the document"] = _in_words(run.document.identity())
    fields["the version"] = f"ring_dilated_attention {__version__}, torch {version('torch')}"
    fields["the checkpoint"] = "none"
    if run.checkpoint is not None:
        state = read_state(run.checkpoint)
        fields["the checkpoint"] = f"step {state['step']} of run {state['run']}"
    if run.fsdp:
        lock = run.folder / LOCK_FILE
        words = "nobody"
        if lock.exists():
            words = f"file {lock.stat().st_ino} of {lock.stat().st_mtime_ns}"
        fields["the owner of the run's folder, which --fsdp needs all hosts to share"] = words
    return fields


def _read_checkpoint(checkpoint: Path) -> tuple[dict[str, Any], Hyperparameters]:
    """The state of a run and its hyperparameters, from a checkpoint.

    Raises ValueError if the checkpoint was renamed, or if a different version of this package made it.
    """
    with offering_older(checkpoint):
        state = read_state(checkpoint)
        if missing := _STATE - state.keys():
            raise ValueError(f"{checkpoint / STATE_FILE} lacks {', '.join(sorted(missing))}")
        if state["step"] != step_of(checkpoint):
            raise ValueError(f"{checkpoint} was renamed: it was saved at step {state['step']}")
        try:
            return state, Hyperparameters.from_dict(state["hyperparameters"])
        except ValueError as error:
            raise ValueError(f"{checkpoint / STATE_FILE}: {error}") from error


@contextmanager
def offering_older(checkpoint: Path) -> Iterator[None]:
    """If the block raises a ValueError, add to its text how to resume from an older checkpoint."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{error}; move {checkpoint} away to go on from the checkpoint before it, if there is one"
        ) from error


def _check_same_document(document: Document, saved: dict[str, Any]) -> None:
    now = document.identity()
    if now["sha256"] != saved["sha256"]:
        raise ValueError(
            f"the document changed since the run began: {now['name']} has {_in_words(now)}; the run had "
            f"{_in_words(saved)}. Restore the document, or start a new run"
        )


def _in_words(document: dict[str, Any]) -> str:
    return f"{document['num_bytes']:,} bytes with sha256 {document['sha256']:.12}..."

"""A run: what to train, on what, and where. What can be wrong with a request is found here, without torch."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import find_checkpoint, read_state
from .data import Document, load_document
from .options import Hyperparameters, resolve

RECORD_FILE = "record.json"


@dataclass(frozen=True)
class Run:
    """`checkpoint` is the one to go on from; None starts at step 0."""

    hyperparameters: Hyperparameters
    document: Document
    folder: Path
    checkpoint: Path | None = None
    save_every: int = 30
    activation_checkpointing: bool = False

    @property
    def is_complete(self) -> bool:
        """Nothing is left to train."""
        return self.checkpoint is not None and read_state(self.checkpoint)["step"] == self.hyperparameters.steps


def prepare(arguments: argparse.Namespace) -> Run:
    """The run that the command line asks for.

    Raises:
        ValueError: if it cannot be, with the message for the user.
    """
    if arguments.save_every < 1:
        raise ValueError(f"--save-every {arguments.save_every} must be at least 1")
    if arguments.resume is None:
        folder, checkpoint = _new_folder(arguments.run_folder), None
        hyperparameters = resolve(arguments, None)
    else:
        if arguments.run_folder is not None:
            raise ValueError("--resume goes on in the run's own folder: leave --run-folder out")
        folder, checkpoint = arguments.resume, find_checkpoint(arguments.resume)
        if checkpoint is None:
            raise ValueError(f"--resume {folder}: there is no checkpoint in this folder; pass a run folder")
        hyperparameters = resolve(arguments, read_state(checkpoint)["hyperparameters"])
    document = load_document(hyperparameters.data, hyperparameters.seq_len, hyperparameters.held_out_windows)
    if checkpoint is not None:
        _check_same_document(document, read_state(checkpoint)["document"])
    return Run(hyperparameters, document, folder, checkpoint, arguments.save_every, arguments.activation_checkpointing)


def initial_state(run: Run) -> dict[str, Any]:
    """Everything a checkpoint holds but tensors: where the run is, what it computes and how it went."""
    if run.checkpoint is not None:
        return read_state(run.checkpoint)
    return {
        "step": 0,
        "hyperparameters": run.hyperparameters.to_dict(),
        "document": document_identity(run.document),
        "bits_per_byte": [],
        "step_seconds": [],
    }


def document_identity(document: Document) -> dict[str, Any]:
    return {"name": document.name, "num_bytes": len(document.content), "sha256": document.fingerprint()}


def _new_folder(folder: Path | None) -> Path:
    if folder is None:
        return Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    if find_checkpoint(folder) is not None or (folder / RECORD_FILE).exists():
        raise ValueError(f"--run-folder {folder} holds a run already: --resume it, or choose another folder")
    return folder


def _check_same_document(document: Document, saved: dict[str, Any]) -> None:
    found = document_identity(document)
    if found["sha256"] != saved["sha256"]:
        raise ValueError(
            f"the document changed since the run began: {found['name']} has {found['num_bytes']:,} bytes with sha256 "
            f"{found['sha256'][:12]}..., the run was trained on {saved['num_bytes']:,} bytes with "
            f"{saved['sha256'][:12]}.... Bring it back, or start a new run"
        )

"""A run: its hyperparameters, its document and its folder. Bad requests are refused here, before torch is imported."""

import argparse
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from .. import __version__
from ..models.saved_run import (
    STATE_FILE,
    check_whole,
    find_checkpoints,
    newest_checkpoint,
    read_state,
    step_of,
)
from .data import Document, load_document
from .files import MOST_BYTES, check_mine, is_our_picture, json_object
from .options import FILES, Hyperparameters, changes, flag, resolve
from .run_folder import LOCK_FILE, may_go_on

RECORD_FILE, PICTURE_FILE = "record.json", "loss.png"
README_FILE, README_TITLE = "README.txt", "Run {} of rda train"
SAMPLE_FILE, SAMPLE_TITLE = "sample.txt", "Text that the model of run {} wrote"

# choices that all ranks make alike
ALIKE = ("save_every", "eval_every", "activation_checkpointing", "fsdp")
# What every state of a run has.
_STATE = {
    "run",
    "from",
    "step",
    "hyperparameters",
    "document",
    "bits_per_byte",
    "step_seconds",
    "held_out",
}


@dataclass(frozen=True)
class Run:
    """What to train, and where: from `checkpoint`, or anew from the parameters of `origin`, or from random ones."""

    hyperparameters: Hyperparameters
    document: Document
    folder: Path
    checkpoint: Path | None = None
    origin: Path | None = None
    save_every: int = 30
    eval_every: int | None = None
    activation_checkpointing: bool = False
    fsdp: bool = False
    # over the metrics of a run that was killed before its first checkpoint
    begins_again: bool = False


def prepare(arguments: argparse.Namespace) -> Run:
    """The run that the command line asks for. A ValueError holds the message for the user."""
    checkpoint = state = origin = origin_state = None
    if arguments.resume is not None:
        for name, value in (("--run-folder", arguments.run_folder), ("--from", arguments.origin)):
            if value is not None:
                raise ValueError(
                    f"--resume goes on with the run in its own folder: leave {name} out"
                )
        folder = arguments.resume
        checkpoint, state = _newest_checkpoint("--resume", folder)
        options = resolve(arguments, Hyperparameters.from_dict(state["hyperparameters"]))
    else:
        before = None
        if arguments.origin is not None:
            origin, origin_state = _newest_checkpoint("--from", arguments.origin)
            before = Hyperparameters.from_dict(origin_state["hyperparameters"])
        options = resolve(arguments, before)
        folder = arguments.run_folder
        if folder is not None and may_go_on(arguments) and find_checkpoints(folder):
            checkpoint, state = _newest_checkpoint("--run-folder", folder)
            _check_same_command(arguments, options, state)
        else:
            folder = _new_folder(folder)
    if state is not None:
        for name, is_ours in files_of(state["run"]).items():
            check_mine(folder / name, is_ours, "this run")
    document = load_document(
        options.data, options.seq_len, options.held_out_bytes, vars(options), options.held_out
    )
    if state is not None:
        _check_same_document(document, state["document"])
    elif origin_state is not None:
        _check_held_out(document, origin_state["document"])
    choices = {name: getattr(arguments, name) for name in ALIKE}
    begins_again = may_go_on(arguments) and checkpoint is None
    return Run(options, document, folder, checkpoint, origin, begins_again=begins_again, **choices)


def initial_state(run: Run) -> dict[str, Any]:
    """What a checkpoint holds beside tensors."""
    if run.checkpoint is not None:
        return read_state(run.checkpoint)
    origins = []
    if run.origin is not None:
        before, folder = read_state(run.origin), str(run.origin.parent.resolve())
        origins = [
            {"folder": folder, "run": before["run"], "step": before["step"]},
            *before["from"],
        ]
    return {
        "run": secrets.token_hex(16),
        "from": origins,
        "step": 0,
        "hyperparameters": run.hyperparameters.to_dict(),
        "document": run.document.identity(),
        "bits_per_byte": [],
        "step_seconds": [],
        "held_out": [],
    }


def fingerprint(run: Run) -> dict[str, str]:
    """What must be the same on all ranks, by name. The document is compared by its content, not by its path."""
    fields = {
        flag(name): str(value)
        for name, value in run.hyperparameters.to_dict().items()
        if name not in FILES
    }
    fields |= {flag(name): str(getattr(run, name)) for name in ALIKE}
    document, begun = run.document.identity(), run.checkpoint or run.origin
    fields["the document"] = (
        f"{document['num_bytes']:,} bytes with sha256 {document['sha256'][:16]}..."
    )
    fields["held-out bytes"] = str(document["num_held_out"])
    fields["the code"] = code_version()
    fields["the checkpoint"] = "none"
    if begun is not None:
        state = read_state(begun)
        fields["the checkpoint"] = f"step {state['step']} of run {state['run']}"
    if run.fsdp:
        lock = run.folder / LOCK_FILE
        words = "nobody"
        if lock.exists():
            words = f"file {lock.stat().st_ino} of {lock.stat().st_mtime_ns}"
        fields["the owner of the run's folder, which --fsdp needs all hosts to share"] = words
    return fields


def code_version() -> str:
    """The versions of torch and of this package, and the digest of its files: two clones may have the same version."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    return f"ring_dilated_attention {__version__} with sha256 {digest.hexdigest()[:16]}..., torch {version('torch')}"


def is_record_of(run: str, file: BinaryIO) -> bool:
    """Whether a record.json is this run's."""
    record = json_object(file.read(MOST_BYTES))
    return record.get("run") == run and record.keys() >= {
        "status",
        "hyperparameters",
        "steps_done",
        "step_seconds",
    }


def _starts_with(line: str, file: BinaryIO) -> bool:
    return file.readline(MOST_BYTES).decode(errors="replace").rstrip() == line


def files_of(run: str) -> dict[str, Callable[[BinaryIO], bool]]:
    """The files that a run leaves at its end, each with the test of whether this run made it."""
    return {
        RECORD_FILE: partial(is_record_of, run),
        PICTURE_FILE: partial(is_our_picture, source=f"run {run}"),
        README_FILE: partial(_starts_with, README_TITLE.format(run)),
        SAMPLE_FILE: partial(_starts_with, SAMPLE_TITLE.format(run)),
    }


def _new_folder(folder: Path | None) -> Path:
    if folder is None:
        return Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    # surrogates: bytes that are not UTF-8
    if any("\ud800" <= letter <= "\udfff" for letter in str(folder)):
        raise ValueError(
            f"--run-folder {str(folder)!r} is not UTF-8, and safetensors opens no such file: rename it"
        )
    if find_checkpoints(folder) or (folder / RECORD_FILE).exists():
        raise ValueError(
            f"--run-folder {folder} holds a run already: --resume it, or choose another folder"
        )
    for name in files_of(""):
        if (folder / name).exists():
            raise ValueError(
                f"--run-folder {folder} holds a {name}, which a run would make: choose another folder"
            )
    return folder


def _newest_checkpoint(option: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    checkpoint = newest_checkpoint(folder, option)
    with offering_older(checkpoint):
        return checkpoint, _checked_state(checkpoint)


@contextmanager
def offering_older(checkpoint: Path) -> Iterator[None]:
    """To a ValueError of the block, add the name of the newest whole checkpoint before this one."""
    try:
        yield
    except ValueError as error:
        newer: list[str] = []
        offer = ", and no whole checkpoint is before it: start a new run"
        for path in find_checkpoints(checkpoint.parent):
            if step_of(path) < step_of(checkpoint):
                with suppress(ValueError):
                    check_whole(path)
                    _checked_state(path)
                    move = f"move {' and '.join(newer)} away, and --resume takes it"
                    offer = f"; the newest whole checkpoint before it is {path}: {move}"
                    break
            newer.append(path.name)
        raise ValueError(f"{error}{offer}") from error


def _checked_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint. A ValueError refuses one that another version of this package or a user made."""
    state = read_state(checkpoint)
    try:
        if missing := _STATE - state.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        total_steps = Hyperparameters.from_dict(state["hyperparameters"]).total_steps
        step, num_losses = step_of(checkpoint), len(state["bits_per_byte"])
        if state["step"] != step or not 1 <= step <= total_steps:
            raise ValueError(
                f"step is {state['step']} of {total_steps}, and the folder's name says {step}"
            )
        if num_losses != step:
            raise ValueError(f"step is {step}, and it has the losses of {num_losses} steps")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{checkpoint / STATE_FILE} is no state of a run: {error}") from error
    return state


def _check_same_command(
    arguments: argparse.Namespace, options: Hyperparameters, saved: dict[str, Any]
) -> None:
    """Raise ValueError unless the command that began the run in its --run-folder had these options."""
    differing = list(changes(options, Hyperparameters.from_dict(saved["hyperparameters"])).values())
    origin = str(arguments.origin.resolve()) if arguments.origin else "none"
    saved_origin = saved["from"][0]["folder"] if saved["from"] else "none"
    if origin != saved_origin:
        differing.append(f"--from {origin} was {saved_origin}")
    if differing:
        what = f"--run-folder {arguments.run_folder} holds a run of another command: {'; '.join(differing)}"
        raise ValueError(f"{what}. Give its options, or choose another folder")


def _check_same_document(document: Document, saved: dict[str, Any]) -> None:
    now = document.identity()
    if (now["sha256"], now["num_held_out"]) != (saved["sha256"], saved["num_held_out"]):
        words = "{num_bytes:,} bytes with sha256 {sha256:.12}..., {num_held_out:,} of them held out"
        raise ValueError(
            f"the document changed since the run began: {now['name']} has {words.format(**now)}; the run had "
            f"{words.format(**saved)}. Bring it back, or start a new run"
        )


def _check_held_out(document: Document, saved: dict[str, Any]) -> None:
    """Raise ValueError if the run of --from was trained on bytes that are to be held out."""
    now, most = document.identity(), saved["num_held_out"]
    if now["sha256"] == saved["sha256"] and now["num_held_out"] > most:
        rule = f"the run of --from trained on all but the last {most:,} bytes of this document"
        raise ValueError(
            f"--held-out-bytes {now['num_held_out']:,}, but {rule}: hold out no more than these"
        )

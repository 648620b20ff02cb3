"""A run: its hyperparameters, its document and its folder. Bad requests are refused here, before torch is imported."""

import argparse
import hashlib
import math
import reprlib
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
from ..models.saved_run import STATE_FILE, check_whole, find_checkpoints, newest_checkpoint, read_state, step_of
from .data import Document, load_document
from .files import MOST_BYTES, check_mine, is_our_picture, json_object
from .options import FILES, Hyperparameters, changes, flag, resolve
from .ownership import LOCK_FILE
from .restarts import are_meant

RECORD_FILE, PICTURE_FILE = "record.json", "loss.png"
README_FILE, README_TITLE = "README.txt", "Run {} of rda train"
SAMPLE_FILE, SAMPLE_TITLE = "sample.txt", "Text that the model of run {} wrote"

ALIKE = ("save_every", "eval_every", "activation_checkpointing", "fsdp")  # choices that all ranks make alike


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
    tensorboard: bool = False
    begins_again: bool = False  # over the metrics of a run that was killed before its first checkpoint


def prepare(arguments: argparse.Namespace) -> Run:
    """The run that the command line asks for. A ValueError holds the message for the user."""
    checkpoint = state = origin = None
    if arguments.resume is None:
        goes_on = arguments.run_folder and are_meant(arguments) and find_checkpoints(arguments.run_folder)
        folder, before = arguments.run_folder if goes_on else _new_folder(arguments.run_folder), None
        if arguments.origin is not None:
            origin, its_state = _newest_checkpoint("--from", arguments.origin)
            before = Hyperparameters.from_dict(its_state["hyperparameters"])
        options = resolve(arguments, before)
        if goes_on:
            checkpoint, state = _newest_checkpoint("--run-folder", folder)
            _check_same_command(arguments, options, state)
    else:
        for name, other in (("--run-folder", arguments.run_folder), ("--from", arguments.origin)):
            if other is not None:
                raise ValueError(f"--resume goes on with the run in its own folder: leave {name} out")
        folder, (checkpoint, state) = arguments.resume, _newest_checkpoint("--resume", arguments.resume)
        options = resolve(arguments, Hyperparameters.from_dict(state["hyperparameters"]))
    if state is not None:
        for file, is_ours in files_of(state["run"]).items():
            check_mine(folder / file, is_ours, "this run")
    document = load_document(options.data, options.seq_len, options.held_out_bytes, vars(options), options.held_out)
    if state is not None:
        _check_same_document(document, state["document"])
    elif origin is not None:
        found, saved = document.identity(), its_state["document"]
        if found["sha256"] == saved["sha256"] and found["num_held_out"] > (most := saved["num_held_out"]):
            rule = f"the run of --from trained on all but the last {most:,} bytes of this document"
            raise ValueError(f"--held-out-bytes {found['num_held_out']:,}, but {rule}: hold out no more than these")
    choices = {name: getattr(arguments, name) for name in (*ALIKE, "tensorboard")}
    begins_again = are_meant(arguments) and checkpoint is None
    return Run(options, document, folder, checkpoint, origin, begins_again=begins_again, **choices)


def initial_state(run: Run) -> dict[str, Any]:
    """What a checkpoint holds beside tensors."""
    if run.checkpoint is not None:
        return read_state(run.checkpoint)
    origins = []
    if run.origin is not None:
        before, folder = read_state(run.origin), str(run.origin.parent.resolve())
        origins = [{"folder": folder, "run": before["run"], "step": before["step"]}, *before["from"]]
    return {
        "run": secrets.token_hex(16),
        "from": origins,
        "step": 0,
        "hyperparameters": run.hyperparameters.to_dict(),
        "document": run.document.identity(),
        **{name: [] for name in ("bits_per_byte", "step_seconds", "held_out")},
    }


def fingerprint(run: Run) -> dict[str, str]:
    """What must be the same on all ranks, by name. The document is compared by its content, not by its path."""
    options = {flag(name): str(value) for name, value in run.hyperparameters.to_dict().items() if name not in FILES}
    document, begun = run.document.identity(), run.checkpoint or run.origin
    state = begun and read_state(begun)
    owner = lock.read_text() if run.fsdp and (lock := run.folder / LOCK_FILE).exists() else "nobody"
    return {
        "the document": f"{document['num_bytes']:,} bytes with sha256 {document['sha256'][:16]}...",
        "held-out bytes": str(document["num_held_out"]),
        "the code": code_version(),
        "the checkpoint": f"step {state['step']} of run {state['run']}" if state else "none",
        **options,
        **{flag(name): str(getattr(run, name)) for name in ALIKE},
        "the owner of the run's folder, which --fsdp needs all hosts to share": owner,
    }


def code_version() -> str:
    """The versions of torch and of this package, and the digest of its files: two clones may have the same version."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    return f"ring_dilated_attention {__version__} with sha256 {digest.hexdigest()[:16]}..., torch {version('torch')}"


def is_record_of(run: str, file: BinaryIO) -> bool:
    """Whether a record.json is this run's."""
    record = json_object(file.read(MOST_BYTES))
    return record.get("run") == run and record.keys() >= {"status", "hyperparameters", "steps_done", "step_seconds"}


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
    if any("\ud800" <= letter <= "\udfff" for letter in str(folder)):  # surrogates: bytes that are not UTF-8
        raise ValueError(f"--run-folder {str(folder)!r} is not UTF-8, and safetensors opens no such file: rename it")
    if find_checkpoints(folder) or (folder / RECORD_FILE).exists():
        raise ValueError(f"--run-folder {folder} holds a run already: --resume it, or choose another folder")
    for name in files_of(""):
        if (folder / name).exists():
            raise ValueError(f"--run-folder {folder} holds a {name}, which a run would make: choose another folder")
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
        newest_first = find_checkpoints(checkpoint.parent)
        for number in range(newest_first.index(checkpoint) + 1, len(newest_first)):
            with suppress(ValueError):
                check_whole(whole := newest_first[number])
                _checked_state(whole)
                newer = " and ".join(path.name for path in newest_first[:number])
                offer = f"; the newest whole checkpoint before it is {whole}: move {newer} away, and --resume takes it"
                break
        else:
            offer = ", and no whole checkpoint is before it: start a new run"
        raise ValueError(f"{error}{offer}") from error


def _checked_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint. A ValueError names a field that is missing or bad."""
    state = read_state(checkpoint)
    try:
        _check_state(state, step_of(checkpoint))
    except ValueError as error:
        raise ValueError(f"{checkpoint / STATE_FILE} is no state of a run: {error}") from error
    return state


def _check_state(state: dict[str, Any], step: int) -> None:
    for name, kind in _STATE.items():
        parent, _, key = name.rpartition(".")
        value = (state[parent] if parent else state).get(key)
        if type(value) is not kind:
            found = "missing" if value is None else reprlib.repr(value)
            raise ValueError(f"{name} is {found}, and should be {_KINDS[kind]}")
    options = Hyperparameters.from_dict(state["hyperparameters"])
    if state["step"] != step or not 1 <= step <= options.total_steps:
        raise ValueError(f"step is {state['step']} of {options.total_steps}, and the folder's name says {step}")
    for name, least in (("bits_per_byte", 0.0), ("step_seconds", math.ulp(0.0))):
        if len(state[name]) != step or not all(isinstance(x, float) and least <= x < MOST for x in state[name]):
            raise ValueError(f"{name} should be {step} numbers from {least:g} to {MOST:g}, one for each step")
    for name, kinds in _ENTRIES.items():
        for entry in state[name]:
            is_right = isinstance(entry, dict) and all(type(entry.get(key)) is kind for key, kind in kinds.items())
            if not is_right or not 1 <= entry["step"] <= (step if name == "held_out" else MOST):
                raise ValueError(f"{name} has {reprlib.repr(entry)}, and should have objects of {', '.join(kinds)}")


MOST = 1e9  # bits per byte, or seconds of a step
# The fields of every state, and their types in JSON.
_STATE = {"run": str, "step": int, "hyperparameters": dict, "bits_per_byte": list, "step_seconds": list}
_STATE |= {"from": list, "held_out": list, "document": dict, "document.name": str, "document.num_bytes": int}
_STATE |= {"document.num_held_out": int, "document.sha256": str}
# The objects in two of these lists: the held-out losses, and the checkpoints that a run comes from, the last one first.
_ENTRIES = {"held_out": {"step": int, "bits_per_byte": float}, "from": {"folder": str, "run": str, "step": int}}
_KINDS = {str: "a text", int: "an integer", dict: "an object", list: "a list"}


def _check_same_command(arguments: argparse.Namespace, options: Hyperparameters, saved: dict[str, Any]) -> None:
    """Raise ValueError unless the command that began the run in its --run-folder had these options."""
    differing = changes(options, Hyperparameters.from_dict(saved["hyperparameters"]))
    asked = str(arguments.origin.resolve()) if arguments.origin else "none"
    began = saved["from"][0]["folder"] if saved["from"] else "none"
    differing |= {"origin": f"--from {asked} was {began}"} if asked != began else {}
    if differing:
        what = f"--run-folder {arguments.run_folder} holds a run of another command: {'; '.join(differing.values())}"
        raise ValueError(f"{what}. Give its options, or choose another folder")


def _check_same_document(document: Document, saved: dict[str, Any]) -> None:
    found = document.identity()
    if (found["sha256"], found["num_held_out"]) != (saved["sha256"], saved["num_held_out"]):
        words = "{num_bytes:,} bytes with sha256 {sha256:.12}..., {num_held_out:,} of them held out"
        raise ValueError(
            f"the document changed since the run began: {found['name']} has {words.format(**found)}; the run had "
            f"{words.format(**saved)}. Bring it back, or start a new run"
        )

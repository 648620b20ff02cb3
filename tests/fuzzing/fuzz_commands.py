"""Command lines of all commands: right ones, spoilt in up to three places.

What must hold: exit code 0 or 2. With 2 one sentence, nothing on stdout, and nothing changed on the disk unless work
had begun; with 0 what is asked for as JSON is JSON; and never a traceback, a lock or something unfinished left behind,
or a change of what somebody else put there.
"""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fuzz import Output, Trial, captured, listing, sentence_of

from benchmarks import command
from ring_dilated_attention.commands import arguments as command_line
from ring_dilated_attention.commands import (
    check,
    cli,
    local_ranks,
    suggest,
    terminal,
    train,
)
from ring_dilated_attention.commands.doctor import examination
from ring_dilated_attention.commands.plan import job_options, one_call
from ring_dilated_attention.models import LongNetViT, segment_lengths_for
from ring_dilated_attention.models.longnet_vit import DILATION_RATES
from ring_dilated_attention.training import checkpoint, files, metrics, options, run, run_folder

TEXT = b"".join(f"line {i} of the document\n".encode() for i in range(200))
# Files that are there before, and that no command may touch.
THEIRS = {
    "text.txt": TEXT,
    "genome.fa": b">chr1\n" + b"ACGTACGGTTCA\n" * 100,
    "empty.txt": b"",
    "short.txt": b"x" * 20,
    "taken/record.json": b'{"mine": 1}',
    "taken/loss.png": b"mine",
    "taken/pattern.png": b"from ring_dilated_attention import DilatedPattern\n",
    "taken/README.md": b"Quoted: Made by `python -m benchmarks --page` from the records in `results/`.\n",
    "mine/unfinished-thesis/chapter": b"one",
    "mine/unfinished-checkpoint-000002/shard-00001-model-00001-of-00001.safetensors": b"mine",
    "mine/notes": b"mine",
    "locked/.rda-train.lock": b"mine",
}
PATHS = [
    "text.txt",
    "genome.fa",
    "empty.txt",
    "short.txt",
    "taken",
    "mine",
    "locked",
    "none",
    "text.txt/x",
    "a/b",
    "/",
]
PATHS += [".", "run", "run/checkpoint-000002", "/proc/x", "/dev/null", "/dev/full"]
PATHS += ["n" * 300, "a\nb", "B\u00fccher", "\udcff"]
NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "64",
    "63",
    "65",
    "1.5",
    "1e3",
    "nan",
    "inf",
    "-inf",
    "1e300",
    "1e-300",
    "-0",
]
NUMBERS += [
    "99999999999",
    str(2**31),
    str(2**63 - 1),
    str(2**63),
    str(-(2**63) - 1),
    str(2**64),
    "9" * 400,
    "9" * 5000,
]
WORDS = [
    "",
    " ",
    "x",
    "None",
    "--",
    "-",
    "-x",
    "--json",
    "--help",
    "1_0",
    "0x10",
    "+5",
    "\u0665",
    "1 2",
    "%s",
    "{}",
]
HOSTILE = [*PATHS, *NUMBERS, *WORDS]
TAKE_PATHS = (
    "--weights",
    "--out",
    "slides",
    "--data",
    "--run-folder",
    "--picture",
    "--record",
    "--results",
    "--save",
    "--prompt-file",
    "--hardware",
    "--config",
)

TRAIN = [
    ["--data", "text.txt"],
    ["--seq-len", "16"],
    ["--steps", "2"],
    ["--num-layers", "1"],
    ["--embed-dim", "8"],
    ["--num-heads", "2"],
    ["--segment-lengths", "4", "16"],
    ["--dilation-rates", "1", "3"],
    ["--held-out-bytes", "16"],
]
MORE_TRAIN = [
    ["--run-folder", "new"],
    ["--run-folder", "mine"],
    ["--run-folder", "a/b/c"],
    ["--run-folder", "run"],
    ["--save-every", "1"],
    ["--learning-rate", "0.01"],
    ["--muon-learning-rate", "0.01"],
    ["--phases", "8:2:1"],
    ["--batch-size", "2"],
    ["--warmup-steps", "1"],
    ["--seed", "3"],
    ["--num-kv-heads", "1"],
    ["--activation-checkpointing"],
    ["--ranks", "1"],
    ["--data", "genome.fa", "text.txt"],
]
PLAN = [
    ["--seq-len", "64"],
    ["--ranks", "4"],
    ["--segment-lengths", "16", "64"],
    ["--dilation-rates", "1", "5"],
]
OF_A_PLAN = [
    ["--window", "8"],
    ["--batch", "2"],
    ["--heads", "4"],
    ["--kv-heads", "2"],
    ["--hardware", "h100"],
    ["--memory", "1Gi"],
    ["--bandwidth", "1e9"],
    ["--latency", "1e-6"],
]
MORE_PLAN = [
    *OF_A_PLAN,
    ["--causal"],
    ["--head-dim", "16"],
    ["--exchange", "all_gather"],
    ["--sharding", "zigzag"],
    ["--documents", "40", "24"],
]
BRANCHES = [["--segment-lengths", "16", "64"], ["--dilation-rates", "1", "5"]]
MODEL = [["--layers", "2"], ["--embed-dim", "24"], ["--seq-len", "64"], *BRANCHES]
MORE_MODEL = [
    *OF_A_PLAN,
    ["--gpus", "4"],
    ["--memory", "1Gi"],
    ["--ffn-dim", "64"],
    ["--vocab", "50"],
    ["--config", "text.txt"],
]
EMBED = [["slides"], ["--weights", "encoder.pth"], ["--heads", "16"], ["--out", "embeddings"]]
MORE_EMBED = [
    ["--embedding", "class"],
    ["--layer", "all"],
    ["--layer", "1"],
    ["--max-wsi-size", "4096"],
    ["--tile-size", "64"],
    ["--heads", "16"],
    ["--device", "cpu"],
    ["slides/a.pt"],
    ["text.txt"],
    ["--out", "taken/record.json"],
    ["--out", "mine"],
    ["--out", "a/b"],
]
GENERATE = [["run"], ["--prompt", "line"], ["--tokens", "3"]]
MORE_GENERATE = [
    ["--temperature", "0"],
    ["--temperature", "0.5"],
    ["--seed", "1"],
    ["--prompt-file", "text.txt"],
]
EVALUATE = [["run"], ["text.txt"]]
MORE_EVALUATE = [
    ["--context", "8"],
    ["--context", "0"],
]
SUGGEST = [["--seq-len", "512"], ["--heads", "2"], ["--speedup", "2"]]
MORE_SUGGEST = [
    ["--layers", "3"],
    ["--not-causal"],
]
DOCTOR: list[list[str]] = []
MORE_DOCTOR = [
    ["--ranks", "1"],
    ["--timeout", "60"],
    ["--save", "a/here.toml"],
    ["--save", "taken/record.json"],
]
# How often, the words that are always there, and those that may be.
COMMANDS = {
    "embed": (4, EMBED, MORE_EMBED),
    "train": (12, TRAIN, MORE_TRAIN),
    "plan": (7, PLAN, MORE_PLAN),
    "plan model": (3, MODEL, MORE_MODEL),
    "generate": (3, GENERATE, MORE_GENERATE),
    "evaluate": (3, EVALUATE, MORE_EVALUATE),
    "suggest": (3, SUGGEST, MORE_SUGGEST),
    "doctor": (2, DOCTOR, MORE_DOCTOR),
    "check": (1, [["--ranks", "0"]], [["--ranks", "1000"]]),
    # as python -m benchmarks
    "benchmarks": (2, [["--page"]], [["--results", "records"], ["--results", "mine"]]),
}


def prepare(folder: Path) -> None:
    """A finished run, to be resumed."""
    start = folder / "start"
    for name, content in THEIRS.items():
        (start / name).parent.mkdir(parents=True, exist_ok=True)
        (start / name).write_bytes(content)
    (start / "records").mkdir()
    shutil.copy(Path(command.__file__).with_name("results") / "linear.json", start / "records")
    os.chdir(start)
    words = [word for group in TRAIN for word in group]
    output = captured(lambda: cli.main(["train", *words, "--run-folder", "run"]))
    assert output.code == 0, output
    Path("slides").mkdir()
    for name, length in (("a", 7), ("b", 12)):
        torch.save(
            {"features": torch.ones(length, 5), "coords": torch.arange(2 * length).view(-1, 2)},
            f"slides/{name}.pt",
        )
    branches = {"segment_lengths": segment_lengths_for(), "dilation_rates": DILATION_RATES}
    torch.save({"model": LongNetViT(5, 32, 1, 16, **branches).state_dict()}, "encoder.pth")


def try_case(rng: random.Random, folder: Path) -> Trial:
    shutil.copytree(folder.parent / "start", folder / "here", symlinks=True)
    os.chdir(folder / "here")
    arguments = draw(rng)
    before = listing(Path())
    # which take seconds
    with mock.patch.object(check, "run_trials", all_passed), a_quick_doctor():
        output = captured(lambda: run_command(arguments))
    output = output._replace(error=output.error.replace("a\nb", "a b"))  # a name of two lines
    complaint = judge(arguments, output, before, listing(Path()))
    asked = cli.split_off(arguments)[1]
    name = asked if asked in COMMANDS else "rda"
    last = output.error.strip().rsplit("\n", 1)[-1][-200:]
    return Trial(f"{name} {output.code}", f"{shown(arguments)}: {last}", complaint)


def run_command(arguments: list[str]) -> int:
    if arguments[:1] != ["benchmarks"]:
        return cli.main(arguments)
    with mock.patch.object(command, "RESULTS", Path("records")):  # not those of this clone
        return command.main(arguments[1:])


def all_passed(trials: Sequence[check.Trial], on_step: Callable[[], object]) -> list[check.Row]:
    return [trial.row("passed", error=0.0, tolerance=1.0, where="out") for trial in trials]


@contextlib.contextmanager
def a_quick_doctor() -> Iterator[None]:
    """Its one rank is this process, and its rates are not measured."""
    names = ("flops_per_second", "backward_flops_per_second", "call_seconds", "around_seconds")

    run_ranks = local_ranks.run_ranks

    def here(
        launch: local_ranks.Launch, function: Callable[..., Any], *rest: Any, **options: Any
    ) -> list[Any]:
        if not function.__module__.endswith(".examination"):
            return run_ranks(launch, function, *rest, **options)
        if launch.seconds < 1 or launch.world_size > 1:
            raise local_ranks.RankFailedError(f"no answer within {launch.seconds:.0f} s")
        return [function(None, *rest)]

    with (
        mock.patch.object(local_ranks, "run_ranks", here),
        mock.patch.object(examination, "rates", return_value=dict.fromkeys(names, 1.0)),
    ):
        yield


def draw(rng: random.Random) -> list[str]:
    """A command line that is right, spoilt in none to three places."""
    weights = [weight for weight, _, _ in COMMANDS.values()]
    name = rng.choices(list(COMMANDS), weights)[0]
    _, always, maybe = COMMANDS[name]
    groups = [
        list(group) for group in [*always, *rng.sample(maybe, rng.randint(0, min(3, len(maybe))))]
    ]
    if name not in ("embed", "generate", "train") and rng.random() < 0.3:
        groups.append(["--json"])
    if name == "plan" and rng.random() < 0.05:  # which takes seconds
        groups.append(["--picture", rng.choice(["pictures", *PATHS])])
    for _ in range(rng.choices([0, 1, 2, 3], [2, 4, 3, 2])[0]):
        spoil(rng, groups)
    for group in groups:  # it would do what it is asked for, for minutes
        if group and group[0] in ("--steps", "--num-layers", "--tokens") and group[1:]:
            with contextlib.suppress(ValueError, ZeroDivisionError):
                group[1] = "8" if 8 < Fraction(group[1]) < 2**63 else group[1]
    words = [word for group in groups for word in group]
    if rng.random() < 0.02:
        return [rng.choice(HOSTILE), *words]
    return [*name.split(), *words]


def spoil(rng: random.Random, groups: list[list[str]]) -> None:
    """Make one thing worse."""
    if not groups:
        groups.append([rng.choice(HOSTILE)])
        return
    group = rng.choice(groups)
    how = rng.random()
    if how < 0.7 and len(group) > 1:
        group[rng.randrange(1, len(group))] = hostile(rng, group[0])
    elif how < 0.8 and group:
        groups.append([group[0], *(hostile(rng, group[0]) for _ in group[1:])])
    elif how < 0.86:
        groups.remove(group)
    elif how < 0.92 and group:
        group.append(hostile(rng, group[0]))
    elif how < 0.96 and group:
        del group[-1]
    elif group:
        group[0] = rng.choice(
            [group[0][:-1], group[0] + "x", group[0].upper(), "-" + group[0].lstrip("-")]
        )


def hostile(rng: random.Random, option: str) -> str:
    """What an option may least expect: more often something of its kind."""
    if rng.random() < 0.2:
        return rng.choice(HOSTILE)
    return rng.choice(PATHS if option in TAKE_PATHS else rng.choice([["0", "-1", "65"], NUMBERS]))


def judge(arguments: list[str], output: Output, before: dict, after: dict) -> str | None:
    """What is wrong with how a command ended, or None."""
    # 1: some slides could not be embedded, and each is named; or the doctor found what is to be mended.
    if output.code not in (0, 2) and not (
        arguments[:1] in (["embed"], ["doctor"]) and output.code == 1
    ):
        return f"it ends with {output.code}: {output.error[-3000:]}"
    if "Traceback" in output.error:
        return f"a traceback: {output.error[-3000:]}"
    for name, content in THEIRS.items():
        if after.get(name) != content:
            return f"{name} was {'changed' if name in after else 'removed'}"
    left = [
        name
        for name in after.keys() - THEIRS.keys()
        if ".lock" in name or "/unfinished-" in f"/{name}"
    ]
    if set(left) - {"mine/unfinished-thesis", "mine/unfinished-checkpoint-000002"}:
        return f"left behind: {left}"
    if output.code == 2:
        has_begun = "step/s" in output.error or "rank/s" in output.error
        if after != before and not has_begun:
            return f"it is refused, and changed {sorted(name for name, _ in set(after.items()) ^ set(before.items()))}"
        return sentence_of(output)
    if is_help(arguments):
        return None
    if "--json" in arguments and output.out:
        return why_no_json(output.out)
    return None


def is_help(arguments: list[str]) -> bool:
    return any(word == "-h" or ("--help".startswith(word) and len(word) > 2) for word in arguments)


def why_no_json(text: str) -> str | None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError as error:
        return f"--json printed no JSON ({error}): {text[:300]!r}"
    return None


def shown(arguments: list[str]) -> str:
    return "rda " + " ".join(
        ascii(word) if not word.isalnum() and word[:1] != "-" else word[:40] for word in arguments
    )


def broken(name: str, replacement: object, *targets: object) -> Callable[[], object]:
    """A context in which a name is something else, wherever it is known."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for target in targets:
                stack.enter_context(mock.patch.object(target, name, replacement))
            yield

    return context


def nothing(*_: object, **__: object) -> None:
    pass


@contextlib.contextmanager
def own_and_leave(folder: Path, *_: object) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / run_folder.LOCK_FILE).open("a"):
        yield folder


def _remove_all_unfinished(target: Path, run: str) -> None:
    for path in target.parent.glob("unfinished-*"):
        shutil.rmtree(path)


BREAKAGES = {
    "numbers are not checked": broken(
        "within", lambda *_: command_line.count, one_call, job_options, suggest
    ),
    "other's files are overwritten": broken("check_mine", nothing, files, metrics, run),
    "unfinished is whatever is called so": broken(
        "_remove_superfluous", _remove_all_unfinished, checkpoint
    ),
    "errors of the system are not caught": broken("in_words", None, terminal),
    "the lock stays": broken("own_folder", own_and_leave, train),
    "hyperparameters are not checked": broken("__post_init__", nothing, options.Hyperparameters),
    "a folder is made before it is checked": broken(
        "find_checkpoint", lambda folder: folder.mkdir(parents=True, exist_ok=True), run
    ),
}

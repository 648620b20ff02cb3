"""Command lines of the commands that read or write files: right ones, of which one or two words are something else.

What must hold: exit code 0 or 2. With 2 one sentence, nothing on stdout, and nothing changed on the disk unless work
had begun; with 0 what is asked for as JSON is JSON; and never a traceback, a lock or something unfinished left behind,
or a change of what somebody else put there.
"""

import contextlib
import io
import json
import os
import re
import shutil
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
from fuzz import Trial, broken

from ring_dilated_attention.commands import cli, terminal
from ring_dilated_attention.models import LongNetViT, segment_lengths_for
from ring_dilated_attention.models.longnet_vit import DILATION_RATES, PUBLISHED, PublishedSize
from ring_dilated_attention.training import files, metrics, run
from ring_dilated_attention.training.files import check_mine

PUBLISHED["tiny"] = PublishedSize(5, 32, 1)  # of the weights that `prepare` writes

# Files that are there before, and that no command may touch.
THEIRS = {
    "text.txt": b"".join(f"line {i} of the document\n".encode() for i in range(200)),
    "empty.txt": b"",
    "taken/record.json": b'{"mine": 1}',
    "taken/pattern.png": b"from ring_dilated_attention import DilatedPattern\n",
    "mine/unfinished-thesis/chapter": b"one",
    "mine/unfinished-checkpoint-000002/shard-00001-model-00001-of-00001.safetensors": b"mine",
    "locked/.rda-train.lock": b"mine",
}
PATHS = [
    "text.txt", "empty.txt", "text.txt/x", *["taken"] * 5, "mine", "locked", "none", "a/b", ".", "run",
    "run/checkpoint-000002", "/proc/x", "/dev/null", "/dev/full", "n" * 300, "a\nb", "B\u00fccher", "\udcff",
]  # fmt: skip
NUMBERS = [
    "0", "-1", "1", "2", "7", "1.5", "nan", "inf", "-inf", "1e300", "1e-300", "-0", str(2**63 - 1), str(2**63),
    str(-(2**63) - 1), "9" * 400, "9" * 5000,
]  # fmt: skip
WORDS = ["", " ", "x", "--", "-", "-x", "--json", "--help", "1_0", "0x10", "\u0665", "%s", "{}"]

BRANCHES = "--segment-lengths 4 16 --dilation-rates 1 3"
TRAIN = "--data text.txt --held-out-bytes 16 --seq-len 16 --steps 2 --num-layers 1 --embed-dim 8 --num-heads 2"
COMMANDS = {
    "train": f"{TRAIN} {BRANCHES} --save-every 1 --learning-rate 0.01 --batch-size 2 --warmup-steps 1 --run-folder new",
    "embed": "slides --weights encoder.pth --out embeddings --layer all --tile-size 64",
    "plan": f"--seq-len 64 --ranks 4 {BRANCHES} --window 8 --heads 4 --kv-heads 2 --picture new.png --json",
    "plan model": f"--seq-len 64 --layers 2 --embed-dim 24 {BRANCHES} --gpus 4 --memory 1Gi --json",
    "generate": "run --prompt line --tokens 3 --temperature 0 --seed 1",
    "evaluate": "run text.txt --context 8 --json",
    "suggest": "--seq-len 512 --heads 2 --speedup 2 --layers 3 --json",
}
BAR = re.compile(r"\d[kMG]?/[\d.]+[kMG]? \[\d")  # of progress, in numbers or in bytes
# what a training run says of its text, before it fails at a step
READ = re.compile(r": [\d,]+ bytes$")


class Output(NamedTuple):
    """What a command left on its streams, and how it ended."""

    code: int
    out: str
    error: str


def captured(words):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001  what nobody caught is what is looked for
            traceback.print_exc()
            code = -1
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Output(code, *texts)


def listing():
    """Every file with its content, and every folder."""
    paths = sorted(Path().rglob("*"))
    return {ascii(str(path)): path.read_bytes() if path.is_file() else None for path in paths}


def prepare(folder):
    """A finished run, to be resumed; slides and an encoder."""
    start = folder / "start"
    for name, content in THEIRS.items():
        (start / name).parent.mkdir(parents=True, exist_ok=True)
        (start / name).write_bytes(content)
    os.chdir(start)
    output = captured(["train", *TRAIN.split(), *BRANCHES.split(), "--run-folder", "run"])
    assert output.code == 0, output
    Path("slides").mkdir()
    slide = {"features": torch.ones(7, 5), "coords": torch.arange(14).view(-1, 2)}
    torch.save(slide, "slides/a.pt")
    branches = {"segment_lengths": segment_lengths_for(), "dilation_rates": DILATION_RATES}
    torch.save({"model": LongNetViT(5, 32, 1, 16, **branches).state_dict()}, "encoder.pth")


def try_case(rng, folder):
    shutil.copytree(folder.parent / "start", folder / "here")
    os.chdir(folder / "here")
    name = rng.choice(["train", *COMMANDS])
    words = COMMANDS[name].split()
    paths = [place for place, word in enumerate(words) if word[0].isalpha()]
    # often a path becomes another one: there a command can do harm
    places = rng.choice([paths, range(len(words))])
    for place in rng.sample(places, min(rng.choice([0, 1, 1, 1, 2]), len(places))):
        same_kind = NUMBERS if words[place][0].isdigit() else PATHS
        words[place] = rng.choice(WORDS if rng.random() < 0.2 else same_kind)
        # It would train for as long as it is told to.
        if words[place - 1] == "--steps" and words[place].isdecimal():
            words[place] = words[place][:2]
    before = listing()
    output = captured([*name.split(), *words])
    output = output._replace(error=output.error.replace("a\nb", "a b"))  # a name of two lines
    complaint = judge(output, before, listing())
    last = output.error.strip().rsplit("\n", 1)[-1][-200:]
    shown = " ".join(ascii(word)[1:-1][:40] for word in words)
    return Trial(f"{name} {output.code}", f"rda {name} {shown}: {last}", complaint)


def judge(output, before, after):
    """What is wrong with how a command ended, or None."""
    # 1: some files could not be embedded, and each is named
    if output.code not in (0, 1, 2) or (output.code == 1 and "rda embed: " not in output.error):
        return f"it ends with {output.code}: {output.error[-3000:]}"
    if "Traceback" in output.error:
        return f"a traceback: {output.error[-3000:]}"
    if changed := [name for name, content in THEIRS.items() if after.get(ascii(name)) != content]:
        return f"changed: {changed}"
    new = after.keys() - before.keys()
    if left := [name for name in new if ".lock" in name or "unfinished-" in name]:
        return f"left behind: {left}"
    if output.code == 2:
        if "start again with smaller learning rates" in output.error:
            return None  # it has trained before, and has told of that
        if after != before:
            return f"it is refused, and changed {sorted(new or before.keys() - after.keys())}"
        return why_no_sentence(output)
    return why_no_json(output.out) if output.out.startswith("{") else None


def why_no_sentence(output):
    """Why a refused command's output is not what it should be: a sentence, or the usage and one; None if it is."""
    if output.out:
        return f"it is refused, and prints {output.out[:200]!r}"
    lines = [
        line
        for line in output.error.splitlines()
        if line.strip() and not (BAR.search(line) or READ.search(line))
    ]
    # a wrapped sentence goes on indented
    lines = lines[:1] + [line for line in lines[1:] if not line.startswith("  ")]
    if lines and lines[0].startswith("usage: "):
        lines = [line for line in lines if ": error: " in line]
    if len(lines) != 1:
        return f"{len(lines)} lines where a sentence belongs: {output.error[:2000]}"
    return None


def why_no_json(text):
    def refuse(name):
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError as error:
        return f"--json printed no JSON ({error}): {text[:300]!r}"
    return None


def check_outside_alone(path, *rules):
    """The broken program overwrites what lies in the folder of its case. A device of the machine would be lost."""
    if not path.resolve().is_relative_to(Path.cwd()):
        check_mine(path, *rules)


BREAKAGES = {
    "other's files are overwritten": broken("check_mine", check_outside_alone, files, metrics, run),
    "errors of the system are not caught": broken("in_words", None, terminal),
}

"""Damaged checkpoints and data: bits flipped, ends cut off, files emptied, swapped, gone, or holding something else.

What must hold when a run is resumed: what is damaged is refused with exit code 2 and one sentence that names it, and
nothing changes on the disk; and what is not damaged (an older checkpoint) changes no bit
of what the run comes to. Some damages are signed: digests are made to fit, so that only what the files say can give
them away. Such a run may also go on, if what they say can be.
"""

import contextlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from fuzz import Output, Trial, captured, listing, sentence_of
from fuzz_commands import broken, nothing
from helpers import StopAfter, sign
from safetensors.torch import load_file

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands import cli
from ring_dilated_attention.models import saved_run
from ring_dilated_attention.models.saved_run import STATE_FILE, find_checkpoint, read_state
from ring_dilated_attention.training import files, loop, metrics, run
from ring_dilated_attention.training.data import load_document
from ring_dilated_attention.training.options import Hyperparameters

TEXT = b"".join(f"line {i} of the document\n".encode() for i in range(200))
NEWEST, OLDER = "run/checkpoint-000004", "run/checkpoint-000002"
TENSOR_FILE = "shard-00001-model-00001-of-00001.safetensors"
VALUES = [
    None,
    True,
    0,
    -1,
    4,
    2**70,
    1.5,
    1e400,
    float("nan"),
    "",
    "4",
    "x" * 999,
    [],
    [[]],
    [1.0],
    {},
    {"a": 1},
]


def prepare(folder: Path) -> None:
    """A run that stopped after 4 of 6 steps, and what it comes to when nothing is damaged."""
    for name in ("start", "whole"):
        (folder / name).mkdir()
    os.chdir(folder / "start")
    Path("text.txt").write_bytes(TEXT)
    options = Hyperparameters(
        data=("text.txt",),
        seq_len=16,
        steps=6,
        num_layers=1,
        embed_dim=8,
        num_heads=2,
        segment_lengths=(4, 16),
        dilation_rates=(1, 3),
        held_out_bytes=16,
    )
    document = load_document(options.data, options.seq_len, options.held_out_bytes)
    whole = run.Run(options, document, Path("run"), save_every=2)
    output = captured(lambda: loop.train(whole, ContextParallel(), StopAfter(4)) and 0)
    assert (output.code, find_checkpoint(Path("run"))) == (0, Path(NEWEST)), output
    record = Path("run/record.json")
    record.write_text(json.dumps({"run": read_state(Path(NEWEST))["run"]}))
    shutil.copytree(folder / "start", folder / "whole", dirs_exist_ok=True)
    os.chdir(folder / "whole")
    assert captured(lambda: cli.main(["train", "--run-folder", "run"])).code == 0


def try_case(rng: random.Random, folder: Path) -> Trial:
    shutil.copytree(folder.parent / "start", folder / "here", symlinks=True)
    os.chdir(folder / "here")
    kind, name, is_signed, damage = draw(rng)
    damage()
    before = listing(Path())
    is_the_same = before == listing(folder.parent / "start")
    arguments = ["--data", name, *NEW_RUN] if kind == "new" else ["--run-folder", "run"]
    output = captured(lambda: cli.main(["train", *arguments]))
    is_harmless = None
    if kind != "new":
        is_harmless = True if is_the_same else is_harmless_in(name)
        if is_signed or kind == "rename_folder":  # which may make an older one the newest
            is_harmless = None
    complaint = judge(name, output, is_harmless, is_signed, before, folder.parent / "whole")
    signed = ", signed" if is_signed else ""
    return Trial(
        f"{kind} {output.code}",
        f"{kind} of {name}{signed}: {output.error.strip()[-300:]}",
        complaint,
    )


NEW_RUN = [
    "--seq-len",
    "16",
    "--steps",
    "1",
    "--num-layers",
    "1",
    "--embed-dim",
    "8",
    "--num-heads",
    "2",
]
NEW_RUN += [
    "--segment-lengths",
    "16",
    "--dilation-rates",
    "1",
    "--held-out-bytes",
    "16",
    "--run-folder",
    "new",
]
# That a resumed run has no use for, or writes anew if it is its own; `None` where only its own judgement tells.
HARMLESS = {"run/record.json": None, OLDER: True, "run/unfinished-x": True}


def is_harmless_in(name: str) -> bool | None:
    return next((verdict for prefix, verdict in HARMLESS.items() if name.startswith(prefix)), False)


def draw(rng: random.Random) -> tuple[str, str, bool, Callable[[], object]]:
    """What kind of damage, to what, whether digests are made to fit, and the deed."""
    which = rng.random()
    if which < 0.12:
        length = rng.choice([0, 1, 31, 32, 33, 200, 5000])
        return "new", "data", False, lambda: Path("data").write_bytes(noise(rng, length))
    if which < 0.3:
        return (
            "header",
            f"{NEWEST}/{TENSOR_FILE}",
            True,
            lambda: change_header(rng, Path(NEWEST), TENSOR_FILE),
        )
    name = rng.choice(
        4 * [f"{NEWEST}/{x}" for x in (TENSOR_FILE, STATE_FILE)]
        + [
            "text.txt",
            NEWEST,
            f"{OLDER}/{STATE_FILE}",
            OLDER,
            "run/record.json",
            "run/unfinished-x",
        ]
    )
    kind, damage = rng.choice(DAMAGES)
    if Path(name).is_dir() or not Path(name).exists():
        kind, damage = rng.choice(FOLDER_DAMAGES)
    return kind, name, False, lambda: damage(rng, Path(name))


def judge(
    name: str, output: Output, is_harmless: bool | None, is_signed: bool, before: dict, whole: Path
) -> str | None:
    """What is wrong with how the command ended, or None. What is signed may be given away by something else."""
    if output.code not in (0, 2) or "Traceback" in output.error:
        return f"it ends with {output.code}: {output.error[-3000:]}"
    if is_signed and "start again with smaller learning rates" in output.error:
        return None  # a state whose rate is 1e21, say, is a state: the run went on, and diverged
    if output.code == 2:
        if listing(Path()) != before:
            return "it is refused, and something changed on the disk"
        if is_harmless:
            return f"nothing of use is damaged, and it is refused: {output.error}"
        if (
            Path(name).name not in output.error
            and "run/checkpoint-" not in output.error
            and not is_signed
        ):
            return f"it does not name {name}: {output.error}"
        if (
            name.startswith(NEWEST)
            and "away to go on from the checkpoint before" not in output.error
            and not is_signed
        ):
            return f"it does not say from where to go on: {output.error}"
        return sentence_of(output)
    if is_harmless is False:
        return "it goes on from what is damaged"
    left = [path for path in Path().rglob("*") if ".lock" in path.name]
    if left:
        return f"left behind: {left}"
    if is_harmless:
        path = Path("run/checkpoint-000006") / TENSOR_FILE
        tensors, expected = load_file(path), load_file(whole / path)
        if tensors.keys() != expected.keys() or any(
            not tensors[name].equal(expected[name]) for name in expected
        ):
            return f"{path} is another than without the damage"
    return None


def flip_bits(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 50])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(rng: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(
        content[: rng.choice([0, 1, 7, 8, 9, len(content) - 1, rng.randrange(len(content))])]
    )


def cut_the_start(rng: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[rng.randrange(1, len(content)) :])


def append(rng: random.Random, path: Path) -> None:
    more = noise(rng, rng.choice([1, 8, 4096]))
    # white space after JSON is no damage
    path.write_bytes(path.read_bytes() + (more if more.strip() else b"\0"))


def overwrite(rng: random.Random, path: Path) -> None:
    """As a disk does that lost a block."""
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.choice([1, 64, 512]))
    content[start:stop] = bytes(stop - start) if rng.random() < 0.5 else noise(rng, stop - start)
    path.write_bytes(content)


def replace(rng: random.Random, path: Path) -> None:
    path.write_bytes(noise(rng, rng.choice([0, 1, 8, 100, 10_000])))


def replace_by_text(rng: random.Random, path: Path) -> None:
    deep = ["[" * 10**5, '{"a":' * 10**4]
    path.write_text(
        rng.choice(
            [
                "{}",
                "[]",
                "null",
                "0",
                '""',
                "{",
                *deep,
                "NaN",
                "1" * 5000,
                '{"made_by": "rda train"}',
            ]
        )
    )


def swap(rng: random.Random, path: Path) -> None:
    other = rng.choice([x for x in Path("run").rglob("*") if x.is_file() and x != path])
    path.write_bytes(other.read_bytes())


def remove(rng: random.Random, path: Path) -> None:
    path.unlink()


def make_folder(rng: random.Random, path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    if rng.random() < 0.5:
        (path / "mine").write_text("mine")


def make_symlink(rng: random.Random, path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(rng.choice(["/nowhere", "/dev/null", path.name, "..", "/proc/self/mem"]))


def empty_folder(rng: random.Random, path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    make_folder(rng, path)


def file_instead(rng: random.Random, path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.write_bytes(noise(rng, 100))


def rename_folder(rng: random.Random, path: Path) -> None:
    if path.is_dir():
        path.rename(
            path.with_name(
                rng.choice(["checkpoint-000005", "checkpoint-5", "checkpoint-" + "9" * 40])
            )
        )
    else:
        file_instead(rng, path)


def noise(rng: random.Random, length: int) -> bytes:
    if rng.random() < 0.3:
        return bytes(rng.choices(b'ACGT\n>;\x00\xff "{}[]', k=length))
    return rng.randbytes(length)


DAMAGES = [
    (deed.__name__, deed)
    for deed in (
        flip_bits, flip_bits, flip_bits, cut, cut_the_start, append, overwrite, replace, replace_by_text, swap, remove,
        make_folder, make_symlink,
    )
]  # fmt: skip
FOLDER_DAMAGES = [(deed.__name__, deed) for deed in (empty_folder, file_instead, rename_folder)]


def change_header(rng: random.Random, folder: Path, name: str) -> None:
    """Another header of tensors, or other tensors under it, with digests that fit."""
    content = (folder / name).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    for _ in range(rng.choice([1, 1, 2])):
        tensor = rng.choice([key for key in header if key != "__metadata__"] or [""])
        how = rng.randrange(6)
        if how == 0 and tensor:
            del header[tensor]
        elif how == 1 and tensor:
            header[rng.choice([f"{tensor}x", "exp_avg/", "/", "", "__metadata__"])] = header.pop(
                tensor
            )
        elif how == 2 and tensor:
            header[tensor]["dtype"] = rng.choice(
                ["F64", "F16", "BF16", "I64", "U8", "BOOL", "F4", "x", None, 0]
            )
        elif how == 3 and tensor:
            header[tensor]["shape"] = rng.choice(
                [[], [1], [-1], [2**62, 4], [0], "x", [*header[tensor]["shape"], 1]]
            )
        elif how == 4 and tensor:
            header[tensor]["data_offsets"] = rng.choice(
                [[0, 0], [0, 4], [8, 4], [0, 2**63], [-1, 3], [], None, [0.5]]
            )
        else:
            body = rng.choice(
                [body[:-4], body + b"1234", bytes([255]) * len(body), noise(rng, len(body))]
            )
    text = json.dumps(header).encode()
    (folder / name).write_bytes(
        struct.pack("<Q", rng.choice([len(text)] * 9 + [0, 2**63])) + text + body
    )
    state = json.loads((folder / STATE_FILE).read_text())["state"]
    sign(folder, state)


BREAKAGES = {
    "no digests": broken("identity", lambda path: {"bytes": path.stat().st_size}, saved_run),
    "no digest of the state": broken("digest", lambda content: "0", saved_run),
    "documents are not compared": broken("_check_same_document", nothing, run),
    "nothing is offered": broken("offering_older", contextlib.nullcontext, run, loop),
    "other's files are overwritten": broken("check_mine", nothing, files, metrics, run),
}

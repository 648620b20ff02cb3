"""Damaged checkpoints and data: bits flipped, ends cut off, files emptied, swapped, gone, or holding something else.

What must hold when a run is resumed: what is damaged is refused with exit code 2 and one sentence that names it, and
nothing changes on the disk; and what is not damaged (an older checkpoint) changes no bit of what the run comes to.
`tests/training/test_checkpoint.py` has damages whose digests fit.
"""

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from fuzz import Output, Trial, captured, listing, sentence_of
from fuzz_commands import broken, nothing
from helpers import StopAfter
from safetensors.torch import load_file

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands import cli
from ring_dilated_attention.models import saved_run
from ring_dilated_attention.models.saved_run import STATE_FILE, find_checkpoint
from ring_dilated_attention.training import loop, run
from ring_dilated_attention.training.data import load_document
from ring_dilated_attention.training.options import Hyperparameters

NEWEST, OLDER = "run/checkpoint-000004", "run/checkpoint-000002"
TENSOR_FILE = "shard-00001-model-00001-of-00001.safetensors"
RESUME = ["train", "--run-folder", "run"]


def prepare(folder: Path) -> None:
    """A run that stopped after 4 of 6 steps, and what it comes to when nothing is damaged."""
    for name in ("start", "whole"):
        (folder / name).mkdir()
    os.chdir(folder / "start")
    Path("text.txt").write_text("".join(f"line {i} of the document\n" for i in range(200)))
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
    shutil.copytree(folder / "start", folder / "whole", dirs_exist_ok=True)
    os.chdir(folder / "whole")
    assert captured(lambda: cli.main(RESUME)).code == 0


def try_case(rng: random.Random, folder: Path) -> Trial:
    shutil.copytree(folder.parent / "start", folder / "here", symlinks=True)
    os.chdir(folder / "here")
    newest = [f"{NEWEST}/{name}" for name in (TENSOR_FILE, STATE_FILE)]
    name = rng.choice([*newest, *newest, "text.txt", f"{OLDER}/{STATE_FILE}"])
    damage = rng.choice(DAMAGES)
    damage(rng, Path(name))
    before = listing(Path())
    is_harmless = name.startswith(OLDER) or before == listing(folder.parent / "start")
    output = captured(lambda: cli.main(RESUME))
    complaint = judge(name, output, is_harmless, before, folder.parent / "whole")
    kind = f"{damage.__name__} {output.code}"
    return Trial(kind, f"{kind} of {name}: {output.error.strip()[-300:]}", complaint)


def judge(name: str, output: Output, is_harmless: bool, before: dict, whole: Path) -> str | None:
    """What is wrong with how the command ended, or None."""
    if output.code not in (0, 2) or "Traceback" in output.error:
        return f"it ends with {output.code}: {output.error[-3000:]}"
    if output.code == 0 and not is_harmless:
        return "it goes on from what is damaged"
    if output.code == 0:
        path = Path("run/checkpoint-000006") / TENSOR_FILE
        tensors, expected = load_file(path), load_file(whole / path)
        is_equal = tensors.keys() == expected.keys() and all(
            tensors[key].equal(expected[key]) for key in expected
        )
        return None if is_equal else f"{path} is another than without the damage"
    if is_harmless:
        return f"nothing of use is damaged, and it is refused: {output.error}"
    if listing(Path()) != before:
        return "it is refused, and something changed on the disk"
    if Path(name).name not in output.error and NEWEST not in output.error:
        return f"it does not name {name}: {output.error}"
    if name.startswith(NEWEST) and "away to go on from the checkpoint before" not in output.error:
        return f"it does not say from where to go on: {output.error}"
    return sentence_of(output)


def flip_bits(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 50])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(rng: random.Random, path: Path) -> None:
    content = path.read_bytes()
    lengths = [0, 1, 7, 8, 9, len(content) - 1, rng.randrange(len(content))]
    path.write_bytes(content[: rng.choice(lengths)])


def cut_the_start(rng: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[rng.randrange(1, len(content)) :])


def append(rng: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" + rng.randbytes(rng.choice([0, 8, 4096])))


def overwrite(rng: random.Random, path: Path) -> None:
    """As a disk does that lost a block."""
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.choice([1, 64, 512]))
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)


def replace(rng: random.Random, path: Path) -> None:
    others = [path.read_bytes() for path in Path("run").rglob("*") if path.is_file()]
    path.write_bytes(
        rng.choice([b"", b"{}", b"[" * 10**5, b"1" * 5000, rng.randbytes(100), *others])
    )


def remove(rng: random.Random, path: Path) -> None:
    path.unlink()


def make_folder(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_symlink(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(rng.choice(["/nowhere", "/dev/null", path.name, "..", "/proc/self/mem"]))


DAMAGES: list[Callable[[random.Random, Path], None]] = [
    flip_bits, flip_bits, cut, cut_the_start, append, overwrite, replace, remove, make_folder, make_symlink,
]  # fmt: skip
BREAKAGES = {
    "no digests": broken("identity", lambda path: {"bytes": path.stat().st_size}, saved_run),
    "no digest of the state": broken("digest", lambda content: "0", saved_run),
    "documents are not compared": broken("_check_same_document", nothing, run),
    "nothing is offered": broken("offering_older", contextlib.nullcontext, run, loop),
}

"""The main job, `make run` without the installation: train a small model, then run examples/longer.py with it.

Measures the seconds of training, the model's bits per byte, and the seconds of longer.py.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ring_dilated_attention.models import LongNetLM

from .gate import gate
from .measure import Sizes, call_json
from .record import branches, markdown

SUMMARY = "make run: seconds of training, bits per byte, seconds of longer.py"
MINUTES = 4
LONGER = Path(__file__).parents[1] / "examples" / "longer.py"


class Settings(NamedTuple):
    options: str = ""  # further options of `rda train --ranks 2`
    lengths: tuple[int, ...] = (8192, 32_768, 131_072)  # for longer.py


FULL = Settings()
QUICK = Settings(
    "--seq-len 512 --steps 1 --phases 64:2:2 --num-layers 1 --embed-dim 32 --num-heads 2 "
    "--segment-lengths 512 --dilation-rates 4 --window 16 --held-out-bytes 512",
    (64, 128),
)


def seconds_of(*words: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "run"
        step("rda train --ranks 2")
        command = ["-m", "ring_dilated_attention", "train", "--ranks", "2"]
        of_train = seconds_of(*command, *settings.options.split(), "--run-folder", str(made))
        trained = json.loads((made / "record.json").read_text())
        config = LongNetLM.from_run(made).config
        step("examples/longer.py")
        lengths = [str(length) for length in settings.lengths]
        of_longer = seconds_of(str(LONGER), "--trained", str(made), "--lengths", *lengths)
    head_dim = config.embed_dim // config.num_heads
    sizes = Sizes(trained["hyperparameters"]["seq_len"], config.num_heads, head_dim)
    row = call_json(sizes, config.pattern) | {
        "window": config.window,
        "train_seconds": of_train,
        "step_seconds": trained["seconds"],
        "steps": trained["step"],
        "bits_per_byte": trained["held_out_bits_per_byte"],
        "gzip_bits_per_byte": trained["gzip_bits_per_byte"],
        "longer_seconds": of_longer,
        "threads_per_rank": 1,
    }
    return [row | {"gate": gate(sizes, config.pattern)}]


def table(rows: list[dict[str, Any]]) -> str:
    [row] = rows
    title = f"{branches(row)}, two processes, at last {row['seq_len']:,} bytes in a step."
    lines = [
        ("`rda train --ranks 2`", f"{row['train_seconds']:.0f} s"),
        (f"of these in {row['steps']:,} steps", f"{row['step_seconds']:.0f} s"),
        ("held out, bits per byte", f"{row['bits_per_byte']:.3f}"),
        ("gzip on the same bytes", f"{row['gzip_bits_per_byte']:.3f}"),
        ("`examples/longer.py`", f"{row['longer_seconds']:.0f} s"),
    ]
    return f"{title}\n\n{markdown(('', 'the main job'), lines)}"

"""What the length is for: the same training step with ever longer sequences, on one process and on two.

    python examples/longer.py                  the newest run in runs/
    python examples/longer.py --trained runs/NAME  a run of `rda train`

Takes the run's model and the text that it was trained on, and does one step (the loss and its gradients) with each
length. With two processes each holds half of every sequence. Dense attention stands beside it: the same model and step,
measured at two short lengths, and beyond them computed from these, as a n + b n^2. Prints a table, and draws longer.png
into the run's folder. It takes half a minute on two cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.models import LongNetLM
from ring_dilated_attention.models.saved_run import newest_checkpoint, read_state
from ring_dilated_attention.training.data import load_document
from ring_dilated_attention.training.machine import peak_resident_bytes


def step_seconds(model: LongNetLM, text: bytearray) -> float:
    """Of the loss and gradients, and of sending. The last positions of a shard are predicted on the next rank."""
    tokens = torch.frombuffer(text, dtype=torch.uint8)[None].long()
    if model.parallel is not None:
        tokens = model.parallel.shard(tokens)
    began = time.perf_counter()
    model.loss(tokens).backward()
    model.zero_grad()
    return time.perf_counter() - began


def measure(run: Path, lengths: list[int], out: Path) -> None:
    """On one rank of those that were started. Longer sequences come later, so that each has its own peak of memory."""
    dist.init_process_group("gloo")
    is_alone = dist.get_world_size() == 1
    model = LongNetLM.from_run(run, parallel=None if is_alone else ContextParallel())
    options = read_state(newest_checkpoint(run))["hyperparameters"]
    text = load_document(tuple(options["data"]), max(lengths), options["held_out_bytes"]).content
    step_seconds(model, bytearray(text[: lengths[0]]))  # a first step makes plans and memory
    steps = []
    for length in lengths:
        seconds = step_seconds(model, bytearray(text[:length]))
        steps.append({"seconds": seconds, "bytes": peak_resident_bytes()})
    dense = {}
    if is_alone:
        for length in (lengths[0] // 2, lengths[0]):
            config = replace(model.config, segment_lengths=(length,), dilation_rates=(1,), window=None)
            dense[length] = step_seconds(LongNetLM(config), bytearray(text[:length]))
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"steps": steps, "dense": list(dense.items())}))
    dist.destroy_process_group()


def measured_on(num_ranks: int, run: Path, lengths: list[int], folder: Path) -> dict[str, Any]:
    out = folder / f"{num_ranks}.json"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    task = [__file__, "--trained", str(run), "--measure", str(out), "--lengths", *map(str, lengths)]
    subprocess.run([sys.executable, *ranks, *task], check=True)
    return json.loads(out.read_text())


def dense_seconds(measured: list[tuple[int, float]], lengths: list[int]) -> list[float]:
    """a n + b n^2 through two measured lengths, the second twice the first."""
    (first, of_first), (_, of_second) = measured
    b = max(0.0, of_second - 2 * of_first) / (2 * first**2)
    a = of_first / first - b * first
    return [a * n + b * n**2 for n in lengths]


def draw(path: Path, lengths: list[int], found: dict[int, Any], dense: list[float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    for number, color in ((1, "tab:blue"), (2, "tab:orange")):
        steps = found[number]["steps"]
        label = "one process" if number == 1 else "two processes"
        seconds.plot(lengths, [step["seconds"] for step in steps], "o-", color=color, label=label)
        label = "one process" if number == 1 else "each of two"
        memory.plot(lengths, [step["bytes"] / 1e9 for step in steps], "o-", color=color, label=label)
    label = "dense attention, one process\n(beyond the first: computed)"
    seconds.plot(lengths, dense, "--", color="tab:gray", label=label)
    seconds.set(title="Seconds of a training step", yscale="log")
    memory.set(title="Peak memory of a process, GB")
    memory.set_ylim(bottom=0)
    for axes in (seconds, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.set_xlabel("bytes in the sequence")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, help="a run folder (default: the newest in runs/)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32_768, 131_072])
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # one of the ranks
    arguments = parser.parse_args()
    run, lengths = arguments.trained, sorted(arguments.lengths)
    if arguments.measure is not None:
        measure(run, lengths, arguments.measure)
        return
    if run is None:
        run = max(path.parent for path in Path("runs").glob("*/record.json"))
    print(f"The same step with longer sequences: the model and the text of {run}\n")
    with tempfile.TemporaryDirectory() as folder:
        found = {number: measured_on(number, run, lengths, Path(folder)) for number in (1, 2)}
    dense = dense_seconds(found[1]["dense"], lengths)
    print("           one process       two processes          dense attention")
    print("  bytes      s       MB      s  MB of each      s on one process")
    for i, length in enumerate(lengths):
        one, two = found[1]["steps"][i], found[2]["steps"][i]
        words = "measured" if i == 0 else "computed"
        print(
            f"{length:7,} {one['seconds']:6.1f} {one['bytes'] / 1e6:8,.0f} {two['seconds']:6.1f} "
            f"{two['bytes'] / 1e6:11,.0f} {dense[i]:6.1f} {words}"
        )
    draw(run / "longer.png", lengths, found, dense)
    print(f"\nAs a picture: {run / 'longer.png'}")


if __name__ == "__main__":
    main()

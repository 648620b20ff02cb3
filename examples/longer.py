"""What the length is for: the same training step with ever longer sequences, on one process and on two.

    python examples/longer.py                      the newest run in runs/
    python examples/longer.py --trained runs/NAME  a run of `rda train`

Does one step of the run's model (the loss and its gradients) with each length. Two processes hold half of a sequence
each. Dense attention stands beside it: the same step, measured at two short lengths, and beyond them computed from
these, as a n + b n^2. Prints a table, and draws longer.png into the run's folder.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.models import LongNetLM


def step_seconds(model: LongNetLM, length: int) -> float:
    """Of the loss and gradients, and of sending, on Python's own modules."""
    paths = sorted(Path(argparse.__file__).parent.glob("*.py"))
    text = bytearray(b"".join(path.read_bytes() for path in paths)[:length])
    tokens = torch.frombuffer(text, dtype=torch.uint8)[None].long()
    tokens = model.parallel.shard(tokens) if model.parallel else tokens
    began = time.perf_counter()
    model.loss(tokens).backward()
    model.zero_grad()
    return time.perf_counter() - began


def measure(run: Path, lengths: list[int], parallel: ContextParallel | None) -> list[dict[str, float]]:
    """A step of each length. Longer ones come later, so that each has its own peak of memory."""
    model = LongNetLM.from_run(run, parallel=parallel)
    step_seconds(model, lengths[0])  # a first step makes plans and memory
    steps = []
    for length in lengths:
        seconds = step_seconds(model, length)
        steps.append({"seconds": seconds, "bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})
    return steps


def measure_dense(run: Path, lengths: tuple[int, int]) -> list[tuple[int, float]]:
    """The seconds of a step in which every position sees all before it."""
    config, measured = LongNetLM.from_run(run).config, []
    for length in lengths:
        dense = replace(config, segment_lengths=(length,), dilation_rates=(1,), window=None)
        measured.append((length, step_seconds(LongNetLM(dense), length)))
    return measured


def measured_by_two(run: Path, lengths: list[int]) -> list[dict[str, float]]:
    """`measure` on the first of two processes that share each sequence, with half of the cores each."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    task = [*ranks, __file__, "--measure", "--trained", str(run), "--lengths", *map(str, lengths)]
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2))}
    done = subprocess.run([sys.executable, *task], check=True, env=env, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def dense_seconds(measured: list[tuple[int, float]], lengths: list[int]) -> list[float]:
    """a n + b n^2 through two measured lengths, the second twice the first."""
    (first, of_first), (_, of_second) = measured
    b = max(0.0, of_second - 2 * of_first) / (2 * first**2)
    a = of_first / first - b * first
    return [a * n + b * n**2 for n in lengths]


def draw(path: Path, lengths: list[int], alone: list[Any], shared: list[Any], dense: list[float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    for steps, label, color in ((alone, "one process", "tab:blue"), (shared, "two processes", "tab:orange")):
        style = {"marker": "o", "color": color, "label": label}
        seconds.plot(lengths, [step["seconds"] for step in steps], **style)
        memory.plot(lengths, [step["bytes"] / 1e9 for step in steps], **style)
    seconds.plot(lengths, dense, "--", color="gray", label="dense attention, one process\n(computed beyond the first)")
    seconds.set(title="Seconds of a training step", yscale="log")
    memory.set(title="Peak memory of a process, GB", ylim=(0, None))
    for axes in (seconds, memory):
        axes.set(xscale="log", xlabel="bytes in the sequence")
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
        axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, help="a run folder (default: the newest in runs/)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32_768, 131_072])
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # one of the ranks
    arguments = parser.parse_args(argv)
    run, lengths = arguments.trained, sorted(arguments.lengths)
    if arguments.measure:
        dist.init_process_group("gloo")
        steps = measure(run, lengths, ContextParallel())
        if dist.get_rank() == 0:
            print(json.dumps(steps))
        dist.destroy_process_group()
        return
    run = run or max((path.parent for path in Path("runs").glob("*/record.json")), default=None)
    if run is None:
        parser.error("runs/ has no run: make one by `rda train`, or name one by --trained")
    print(f"The same step with longer sequences: the model of {run}\n")
    alone = measure(run, lengths, None)
    dense = dense_seconds(measure_dense(run, (lengths[0] // 2, lengths[0])), lengths)
    shared = measured_by_two(run, lengths)
    print("           one process       two processes      dense attention, one process")
    for i, length in enumerate(lengths):
        words = [f"{length:9,}"]
        for step in (alone[i], shared[i]):
            words.append(f"{step['seconds']:5.1f} s, {step['bytes'] / 1e6:5,.0f} MB")
        print(*words, f"{dense[i]:7,.0f} s ({'computed' if i else 'measured'})", sep="   ")
    draw(run / "longer.png", lengths, alone, shared, dense)
    print(f"\nAs a picture: {run / 'longer.png'}")


if __name__ == "__main__":
    main()

"""`make faults`: 30 trials of each kind of fault.

Every place where a rank can fail, with 2 to 4 ranks, is tried once per kind. Which rank fails, whether its messages are
in flight, and how big they are is drawn by chance. The exit status is 1 unless all trials pass.

`--ranks 8 --places user handshake --trials 30`: other numbers of ranks, some places alone, so many trials of each kind.
From 4 ranks on handshakes go in rounds: a rank names the rank for which it waited, which may have waited itself.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for what tests share

from faults import CAUSAL, Fault, Trial, run_trial

from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import ShardSpec, make_shards

KINDS = ("kill", "stop", "raise")
PLACES = ("user", "handshake", "after the handshake")  # and those of hops


def places(world_sizes: Sequence[int]) -> Iterator[tuple[int, str, str]]:
    """(world size, stage, place): all of them."""
    for world_size in world_sizes:
        for stage in ("forward", "backward"):
            yield from ((world_size, stage, place) for place in PLACES)
            for hop in range(1, world_size):
                yield world_size, stage, f"hop {hop}, keys and values"
                if stage == "backward":
                    yield world_size, stage, f"hop {hop}, gradients"


def draw(rng: random.Random, kind: str, world_size: int, stage: str, place: str) -> Fault:
    """A fault at this place, of a rank that posts messages there."""
    while True:
        fault = Fault(
            world_size,
            rng.randrange(world_size),
            kind,
            stage,
            place,
            in_flight=rng.random() < 0.7,
            is_causal=rng.random() < 0.3,
            chunk_bytes=rng.choice([128 * 1024, 4 * 2**20, 16 * 2**20]),
            timeout=30 if kind == "kill" else 2,
        )
        if not fault.is_causal or place in PLACES or posts_messages(fault):
            return fault


def posts_messages(fault: Fault) -> bool:
    """Whether the rank has messages at the place, under causality, where nothing wraps."""
    shards = make_shards(
        "contiguous",
        ShardSpec("contiguous", fault.world_size).default_lengths(64 * fault.world_size),
    )
    number = int(fault.place[4])  # of the hop
    for hop in make_plan(Job(CAUSAL, shards, 2, 2), fault.rank).hops[number - 1 : number]:
        return bool(
            hop.grad_sends or hop.grad_receives
            if "gradients" in fault.place
            else hop.sends or hop.receives
        )
    return False


def row(number: int, trial: Trial) -> str:
    fault = trial.fault
    seconds = " ".join(f"{trial.seconds[rank]:.2f}" for rank in sorted(trial.seconds))
    when = "in flight" if fault.in_flight and fault.place != "user" else "before"
    size = f"{fault.chunk_bytes / 2**20:g} MiB"
    verdict = "ok" if not trial.complaints else "FAILED"
    return (
        f"{number:5}  {fault.kind:5}  {fault.rank} of {fault.world_size}  {fault.stage:8}  {fault.place:22}  {when:9}  "
        f"{size:>9}  {seconds:15}  {verdict}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 3, 4))
    parser.add_argument(
        "--places", nargs="+", metavar="WORD", help="the first words of places (default: all)"
    )
    parser.add_argument(
        "--trials", type=int, help="how many of each kind (default: one for each place)"
    )
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    print(f"seed {arguments.seed}")
    print(
        "trial  fault  rank    stage     place                   when           chunk  error after, s   message"
    )
    all_passed = True
    tried = [
        x
        for x in places(arguments.ranks)
        if not arguments.places or x[2].split()[0] in arguments.places
    ]
    for kind in arguments.kinds:
        trials = []
        for number, place in enumerate(
            islice(cycle(tried), arguments.trials or len(tried)), start=1
        ):
            trials.append(run_trial(draw(rng, kind, *place)))
            print(row(number, trials[-1]), flush=True)
            for complaint in trials[-1].complaints:
                print(f"       {complaint}", flush=True)
        passed = sum(not trial.complaints for trial in trials)
        all_passed &= passed == len(trials)
        seconds = [x for trial in trials for x in trial.seconds.values()]
        spread = (
            f"median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
            if seconds
            else "no errors"
        )
        print(
            f"{kind}: {passed} of {len(trials)} passed; from the fault to the others' errors {spread}"
        )
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""`make faults`: 30 trials of each kind of fault.

Every place where a rank can fail, with 2 to 4 ranks, is tried once per kind. Which rank fails, whether its messages are
in flight, and how big they are is drawn by chance. The exit status is 1 unless all trials pass.
From 4 ranks on handshakes go in rounds: a rank names the rank for which it waited, which may have waited itself.
"""

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for what tests share

from faults import Fault, run_trial

KINDS = ("kill", "stop", "raise")
PLACES = ("user", "handshake", "after the handshake")  # and those of hops


def places():
    """(world size, stage, place): all of them."""
    for world_size in (2, 3, 4):
        for stage in ("forward", "backward"):
            yield from ((world_size, stage, place) for place in PLACES)
            for hop in range(1, world_size):
                yield world_size, stage, f"hop {hop}, keys and values"
                if stage == "backward":
                    yield world_size, stage, f"hop {hop}, gradients"


def draw(rng, kind, world_size, stage, place):
    """A fault at this place. (Under causality some ranks have no message at a hop: it is drawn for other places.)"""
    return Fault(
        world_size,
        rng.randrange(world_size),
        kind,
        stage,
        place,
        in_flight=rng.random() < 0.7,
        is_causal=place in PLACES and rng.random() < 0.3,
        chunk_bytes=rng.choice([128 * 1024, 4 * 2**20, 16 * 2**20]),
        timeout=30 if kind == "kill" else 2,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    seed = parser.parse_args().seed
    rng = random.Random(seed)
    print(f"seed {seed}")
    all_passed = True
    for kind in KINDS:
        trials = []
        for number, place in enumerate(places(), start=1):
            trial = run_trial(draw(rng, kind, *place))
            trials.append(trial)
            after = " ".join(f"{seconds:.2f}" for _, seconds in sorted(trial.seconds.items()))
            verdict = "FAILED" if trial.complaints else "ok"
            print(f"{number}: {trial.fault}, errors after {after} s: {verdict}", flush=True)
            for complaint in trial.complaints:
                print(f"       {complaint}", flush=True)
        passed = sum(not trial.complaints for trial in trials)
        all_passed &= passed == len(trials)
        seconds = [x for trial in trials for x in trial.seconds.values()]
        spread = f"median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
        print(f"{kind}: {passed} of {len(trials)} passed; the others' errors came after {spread}")
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Groups of two, three and four real ranks (gloo), started once, that serve cases until one goes wrong: then its group
is ended. What a rank does in a case is a Desk's to say, one for each kind.
"""

import contextlib
import faulthandler
import functools
import pickle
import random
import time
import warnings
from datetime import timedelta
from importlib import import_module

import distributed
import torch
import torch.distributed as dist
from fuzz import Trial
from fuzz_calls import why_not_refused

PATIENCE = timedelta(seconds=120)
AT_ONCE = 60.0  # seconds: less than PATIENCE, and more than a loaded machine takes
STUCK = 600.0  # seconds: longer than a case takes that waits for all its timeouts
broken_now = None  # how the ranks that this process starts are to be broken
_teams = {}  # by the module of the kind and the number of ranks


class Team:
    """The ranks that serve, seen from the process that asks."""

    def __init__(self, module, world_size):
        self.ranks = distributed.Ranks(world_size, serve, module, broken_now, stay=True).__enter__()
        self.num_asked = 0

    def ask(self, seed):
        """Every rank's trial of the case with this seed."""
        self.num_asked += 1
        store, number = self.ranks.store, self.num_asked
        keys = [f"done {number} {rank}" for rank in range(self.ranks.world_size)]
        store.set(f"case {number}", str(seed))
        try:
            store.wait(keys, timedelta(seconds=50))
        except dist.DistStoreError:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            said = {rank: out.value for rank, out in self.ranks.collect(missing, 0).items()}
            return [Trial("no end", "", f"ranks that did not come to an end: {said}")]
        return [pickle.loads(store.get(key)) for key in keys]


def try_on_ranks(module, rng, world_sizes=(2, 2, 3, 4)):
    """A case of the kind of this module, which has a Desk and RANK_BREAKAGES."""
    world_size = rng.choice(world_sizes)
    if (module, world_size) not in _teams:
        _teams[module, world_size] = Team(module, world_size)
    trials = _teams[module, world_size].ask(rng.randrange(2**62))
    wrong = [
        f"rank {rank}: {trial.complaint}"
        for rank, trial in enumerate(trials)
        if trial.complaint is not None
    ]
    if wrong:
        _teams.pop((module, world_size)).ranks.__exit__()
    return trials[0]._replace(complaint="\n".join(wrong) or None)


def serve(rank, world_size, module, broken):
    """Cases, until this process is ended."""
    warnings.filterwarnings("ignore", message="ranks have .* positions; a near-equal cut")
    warnings.filterwarnings("ignore", message=".* positions, as many as the .* cut last")
    torch.use_deterministic_algorithms(True)  # memory that is not initialised is NaN
    kind = import_module(module)
    # Held for as long as this process lives: a context that nobody holds is left at once.
    with kind.RANK_BREAKAGES[broken]() if broken is not None else contextlib.nullcontext():
        desk = kind.Desk(world_size)
        number = 0
        while True:
            number += 1
            distributed.store.wait([f"case {number}"], timedelta(days=1))
            # where it is, should it not come to an end
            faulthandler.dump_traceback_later(STUCK, exit=False)
            trial = desk.trial_of(random.Random(int(distributed.store.get(f"case {number}"))))
            faulthandler.cancel_dump_traceback_later()
            distributed.store.set(f"done {number} {rank}", pickle.dumps(trial))


def in_ranks(breakages):
    """The BREAKAGES of a kind, from its RANK_BREAKAGES: ranks are broken in their own processes."""
    return {name: functools.partial(_in_ranks, name) for name in breakages}


@contextlib.contextmanager
def _in_ranks(name):
    global broken_now
    broken_now = name
    yield
    broken_now = None


def why_not_refused_at_once(attempt):
    """All ranks try it together: none must compute, or wait for the timeout."""
    start = time.monotonic()
    complaint = why_not_refused(attempt)
    seconds = time.monotonic() - start
    return complaint or (f"it is refused after {seconds:.1f} s" if seconds > AT_ONCE else None)

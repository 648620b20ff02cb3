"""Groups of two, three and four real ranks (gloo), started once, that serve cases until one goes wrong: then its group
is ended. What a rank does in a case is a Desk's to say, one for each kind.
"""

import contextlib
import faulthandler
import pickle
import random
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import distributed
import torch
import torch.distributed as dist
from fuzz import Trial

Outcome = tuple[str, str | None]  # what was done, and what is wrong with what came of it
PATIENCE = timedelta(seconds=8)
AT_ONCE = 7.0  # seconds: less than PATIENCE, and more than the 5 that a name server which is silent takes torch
STUCK = 40.0  # seconds: longer than a case takes that waits for all its timeouts
broken_now: str | None = None  # how the ranks that this process starts are to be broken
_teams: "dict[tuple[str, int], Team]" = {}  # by the module of the kind and the number of ranks


class Team:
    """The ranks that serve, seen from the process that asks."""

    def __init__(self, module: str, world_size: int) -> None:
        self.ranks = distributed.Ranks(world_size, serve, module, broken_now, stay=True).__enter__()
        self.num_asked = 0

    def ask(self, seed: int) -> list[Trial]:
        """Every rank's trial of the case with this seed."""
        self.num_asked += 1
        store, number = self.ranks.store, self.num_asked
        keys = [f"done {number} {rank}" for rank in range(self.ranks.world_size)]
        store.set(f"case {number}", str(seed))
        try:
            store.wait(keys, timedelta(seconds=50))
        except dist.DistStoreError:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            said = [
                f"rank {rank}: {outcome.value}"
                for rank, outcome in self.ranks.collect(missing, 0).items()
            ]
            return [
                Trial("no end", "", "\n".join([f"ranks {missing} did not come to an end", *said]))
            ]
        return [pickle.loads(store.get(key)) for key in keys]

    def end(self) -> None:
        self.ranks.__exit__()


def try_on_ranks(
    module: str, rng: random.Random, world_sizes: Sequence[int] = (2, 2, 3, 4)
) -> Trial:
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
        _teams.pop((module, world_size)).end()
    return trials[0]._replace(complaint="\n".join(wrong) or None)


def serve(rank: int, world_size: int, module: str, broken: str | None) -> None:
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


class TeamDesk(ABC):
    """One rank, and what it keeps from case to case."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    @abstractmethod
    def deeds(self) -> dict[Callable[[random.Random], Outcome], int]:
        """What may be done in a case, and how often."""

    def trial_of(self, rng: random.Random) -> Trial:
        """What this rank finds. All draw the same numbers."""
        self.odd = rng.randrange(self.world_size)  # that errs, where one does
        deeds = self.deeds()
        deed = rng.choices([*deeds], [*deeds.values()])[0]
        try:
            description, complaint = deed(rng)
        except Exception:  # noqa: BLE001  whatever it is, it is reported
            description, complaint = "", traceback.format_exc()
        name = f"{deed.__name__}, {self.world_size} ranks"
        return Trial(name, f"{name}: {description}", complaint)


def in_ranks(breakages: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """The BREAKAGES of a kind, from its RANK_BREAKAGES: ranks are broken in their own processes."""
    return {name: _in_ranks(name) for name in breakages}


def _in_ranks(name: str) -> Callable[[], Any]:
    @contextlib.contextmanager
    def context() -> Iterator[None]:
        global broken_now
        broken_now = name
        yield
        broken_now = None

    return context


def why_not_refused_at_once(attempt: Callable[[], Any], *words: str) -> str | None:
    """All ranks try it together: none must compute, or wait for the timeout. words: what the sentence must say."""
    start = time.monotonic()
    try:
        attempt()
    except ValueError as error:
        seconds = time.monotonic() - start
        if seconds > AT_ONCE:
            return f"it is refused after {seconds:.1f} s"
        if len(str(error)) <= 10 or not all(word in str(error) for word in words):
            return f"it says too little: {error}"
        return None
    except Exception:  # noqa: BLE001  whatever it is, it is not what a user can be told
        return f"after {time.monotonic() - start:.1f} s, where a ValueError belongs: {traceback.format_exc()}"
    return "it is taken"

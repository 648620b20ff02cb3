"""Compares other libraries (peers) with this one. Are a peer's results right, and what do its calls cost?

A peer is right if it computes what it claims to compute. A peer that is wrong is measured all the same. If a peer
cannot be installed or run, its row has the reason.

Each peer runs in a Python environment that is made for it in benchmarks/.environments, unless torch alone is enough.
The package index has no version of torchscale with LongNet: set TORCHSCALE_CHECKOUT to the folder of a clone.
"""

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from ..gate import GateError, gate
from ..measure import call_json
from . import examine
from .adapters import this_library
from .catalogue import ENVIRONMENTS, PEERS, Peer
from .environments import ROOT, NotThereError, run_in
from .examine import Sizes, own_pattern
from .report import table

__all__ = ["FULL", "MINUTES", "QUICK", "SUMMARY", "Settings", "run", "table"]

SUMMARY = "other libraries: right or not, and time, memory and bytes beside them"
MINUTES = 30
SCRIPTS = ROOT / "benchmarks" / "peer_errors"


class Settings(NamedTuple):
    peers: tuple[Peer, ...] = PEERS
    of_each: examine.Settings = examine.Settings()


FULL = Settings()
# Only the peers that need no environment, at tiny sizes: they take a few seconds.
AT_HAND = ("this library", "torch SDPA", "torch's private ring")
QUICK = Settings(
    tuple(peer for peer in PEERS if peer.name in AT_HAND),
    examine.Settings(
        sizes=Sizes(512, 2, 16),
        inputs=("full", "causal"),
        repeats=1,
        seconds=(60, 60),
    ),
)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    """Examine all peers. Returns a row for each. step: gets the name of a peer before it is examined."""
    rows = []
    for peer in settings.peers:
        step(peer.name)
        pattern = own_pattern(peer, settings.of_each.sizes)
        rows.append(
            {
                "peer": peer.name,
                "version": peer.version,
                **call_json(settings.of_each.sizes._replace(dtype=peer.dtype), pattern),
                "ranks": peer.ranks,
                "sharding": peer.sharding,
                "threads_per_rank": 1,
                "has_backward": peer.has_backward,
                "stands_in": peer.stands_in,
                "lines": peer.lines,
                **found_of(peer, settings.of_each),
            }
        )
    return rows


def found_of(peer: Peer, settings: examine.Settings) -> dict[str, Any]:
    """The results of running a peer, as entries of its row. If it cannot be run, the row has the reason.

    Raises:
        GateError: if the peer is this library, and one of its results is not right.
    """
    try:
        if peer.needs and not os.environ.get(peer.needs):
            raise NotThereError(f"{peer.needs} is not set: it names a clone of its repository")
        if not peer.environment:
            found = examine.examine(peer, settings)
        else:
            if prepare := ENVIRONMENTS[peer.environment].prepare:
                run_in(peer.environment, ["-c", prepare], 900)
            arguments = ["-m", "benchmarks.peers.examine", examine.encoded(peer, settings)]
            seconds = len(settings.inputs) * settings.seconds[0] + settings.seconds[1]
            found = json.loads(run_in(peer.environment, arguments, seconds).splitlines()[-1])
        found["shown_by"] = {name: shown(peer, name) for name in peer.shown_by}
    except NotThereError as error:
        sizes = settings.sizes._replace(dtype=peer.dtype)
        found = {"reason": str(error), "inputs": {}, "gate": gate(sizes, own_pattern(peer, sizes))}
    if peer.adapter is this_library:
        for name, result in found["inputs"].items():
            if result["verdict"] != "right":
                raise GateError(
                    f"{peer.name}, {name}: {result}. Nothing is recorded; `rda check` says more."
                )
    return found


def shown(peer: Peer, name: str) -> list[str]:
    """Run a script of benchmarks/peer_errors. Returns the lines that say what was found and what it should be."""
    arguments = [str(SCRIPTS / f"{name}.py")]
    if peer.ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(peer.ranks)]
        arguments = launcher + arguments
    try:
        said = run_in(peer.environment, arguments, 120)
    except NotThereError as error:  # the peer's row keeps its other results
        return [f"not run: {error}"]
    return [line for line in said.splitlines() if "should be" in line]

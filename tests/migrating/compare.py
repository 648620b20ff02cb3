"""`make migrating`: runs each pair of snippets of docs/migrating.md, theirs where the peer is installed, and compares.

    python -m migrating.compare [--environments FOLDER] [--only WORD] [--keep]

FOLDER holds the environments that `python -m benchmarks peers` makes, or symlinks to them. TORCHSCALE_CHECKOUT and
DARCSTAR_CHECKOUT name clones. What cannot be run fails, with the reason. `--keep` writes what peers computed, where
ours is the same, to data/migrating.safetensors: `make test` compares ours with it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers import ROOT, relative_error
from migrating.cases import CASES, COLUMNS, SIDES, Case, stated
from safetensors.torch import save_file

from ring_dilated_attention.plan.sharding import deal_documents

HERE = Path(__file__).parent
OURS = str(ROOT / "src")
KEPT = ROOT / "tests" / "data" / "migrating.safetensors"
CHECKOUTS = {
    "TORCHSCALE_CHECKOUT": "github.com/microsoft/torchscale (read at 4d1e0e8)",
    "DARCSTAR_CHECKOUT": "github.com/DarcStar-Solutions-Tech/dilated-attention-pytorch (read at f6094f7)",
}
# Places in which packages that need a GPU are stood in for. (For clones peer.py does it, or they do without.)
STOOD_IN = {("rings", (), 2), ("dilated", (), 1)}
TOLERANCE = 0.05  # of a figure that the page states with two digits

Found = Mapping[str, Any]  # tensors by name, or what was "raised"


class NotRunError(Exception):
    """Snippets could not be run. The message is the reason."""


class Place(NamedTuple):
    """Where snippets run together."""

    environment: str
    checkouts: tuple[str, ...]
    ranks: int


def interpreter(place: Place, folder: Path) -> tuple[str, dict[str, str]]:
    """The interpreter of an environment, and its variables.

    Raises:
        NotRunError: if it is not there.
    """
    for name in place.checkouts:
        if not os.environ.get(name):
            raise NotRunError(f"{name} is not set: it names a clone of {CHECKOUTS[name]}")
    python = folder / place.environment / "bin" / "python"
    if not python.exists():
        raise NotRunError(f"{python} is not there: python -m benchmarks peers makes it")
    stand_ins = [str(HERE / "stand_ins")] if place in STOOD_IN else []
    return str(python), {
        "PYTHONPATH": os.pathsep.join(
            [*stand_ins, *(os.environ[name] for name in place.checkouts), OURS]
        ),
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(folder / "extensions")),
    }


def run(
    cases: Sequence[Case], side: str, folder: Path, python: str, variables: Mapping[str, str]
) -> None:
    """Writes what each rank found into the folder.

    Raises:
        NotRunError: with the end of what was said, if the ranks do not come to theirs.
    """
    jobs = {
        case.key: {"snippet": case.snippets[SIDES.index(side)], "given": case.given()}
        for case in cases
    }
    torch.save(jobs, folder / "jobs.pt")
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(cases[0].ranks),
    ]
    try:
        done = subprocess.run(
            [python, *launcher, str(HERE / "peer.py"), str(folder), side],
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        )
    except subprocess.TimeoutExpired:
        raise NotRunError("no end within ten minutes") from None
    if done.returncode:
        raise NotRunError(done.stderr[-2000:])


def run_all(cases: Sequence[Case], environments: Path, folder: Path) -> dict[str, str]:
    """Runs all snippets of theirs, then all of ours. Returns why what could not be run was not, by case."""
    reasons = {}
    for side in SIDES:
        places: dict[Place, list[Case]] = {}
        for case in cases:
            is_ours = side == "ours" or not case.environment
            place = (
                Place("", (), case.ranks)
                if is_ours
                else Place(case.environment, case.checkouts, case.ranks)
            )
            places.setdefault(place, []).append(case)
        for place, together in places.items():
            own = sys.executable, {"PYTHONPATH": OURS}
            try:
                run(
                    together,
                    side,
                    folder,
                    *(interpreter(place, environments) if place.environment else own),
                )
            except NotRunError as error:
                reasons |= {case.name: str(error) for case in together}
    return reasons


def whole(case: Case, folder: Path) -> Found:
    """The peer's output in the order of positions; the sum of what each rank's loss adds to the gradients."""
    ranks = [
        torch.load(folder / case.key / f"theirs{rank}.pt", weights_only=True)
        for rank in range(case.ranks)
    ]
    if raised := [rank for rank in ranks if "raised" in rank]:
        return raised[0]
    found = {
        name: torch.stack([rank[name] for rank in ranks]).sum(0)
        for name in ranks[0]
        if name != "out"
    }
    outs = [rank["out"] for rank in ranks]
    if case.order == "zigzag":
        halves = [x.chunk(2, 1) for x in outs]
        outs = [first for first, _ in halves] + [last for _, last in reversed(halves)]
    if case.order == "zigzag_documents":
        shards = deal_documents((0, 24, 64), case.num_positions, case.ranks)
        positions = torch.cat([torch.arange(*span) for shard in shards for span in shard])
        outs = [torch.cat(outs, 1)[:, positions.argsort()]]
    out = torch.stack(outs, 2).flatten(1, 2) if case.order == "stripe" else torch.cat(outs, 1)
    return found | {"out": out}


def agrees(said: str, error: float) -> bool:
    """Whether a cell of the page's table is what was found."""
    if said.startswith("<"):
        return error < float(said[1:])
    return said[:1].isdigit() and abs(error / float(said) - 1) < TOLERANCE


def cells(said: Mapping[str, str], theirs: Found, ours: Found) -> Iterator[tuple[str, bool]]:
    """What was found for each column, and whether it is what the page says."""
    if "raised" in theirs or "raised" in ours:
        text = f"theirs raised {theirs.get('raised')}, ours raised {ours.get('raised')}"
        yield (
            text[:300],
            "raised" not in ours and theirs["raised"].startswith(said["out"] or "nothing"),
        )
        return
    for name in COLUMNS:
        if name in theirs and name in ours:
            error = relative_error(theirs[name], ours[name])
            yield f"{name} {error:.1e}", agrees(said[name], error)
        else:
            yield f"{name} -", not said[name]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run both snippets of each pair of docs/migrating.md, and compare."
    )
    parser.add_argument("--environments", type=Path, default=ROOT / "benchmarks" / ".environments")
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument(
        "--keep", action="store_true", help="write what peers computed for `make test`"
    )
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in case.name]
    table, kept, faults = stated(), {}, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reasons = run_all(cases, arguments.environments.absolute(), folder)
        for case in cases:
            if case.name in reasons:
                found = [(f"not run: {reasons[case.name]}", False)]
            else:
                theirs = whole(case, folder)
                if table[case.name]["out"].startswith("<") and "out" in theirs:
                    kept[case.name] = theirs["out"].contiguous()
                ours = torch.load(folder / case.key / "ours0.pt", weights_only=True)
                found = list(cells(table[case.name], theirs, ours))
            is_right = all(right for _, right in found)
            faults += not is_right
            print(
                f"{case.name}: {', '.join(text for text, _ in found)}{'' if is_right else ' <- not so on the page'}"
            )
    if arguments.keep and not arguments.only and not faults:
        save_file(kept, KEPT)
    print(
        f"{faults} of {len(cases)} cases are not as the page says."
        if faults
        else "All cases are as the page says."
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""What only several GPUs can show: NCCL, the network between cards, overlap, and a rank that fails.

Each part runs in processes of its own, one for each GPU, and has its own limit of seconds: what hangs or crashes costs
that part alone. All limits together are less than ten minutes. The record is written whenever a part ends. No machine
with several GPUs has run this yet: `--quick` rehearses it on two CPU ranks over gloo.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import ContextParallel, DilatedPattern
from ring_dilated_attention.commands.errors import FLOOR_ON_GPU, Case, Squares, measure, tolerances, worst
from ring_dilated_attention.commands.local_ranks import Launch, RankFailedError, Worker, run_ranks
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.ranks.link import ExchangeError, GroupLink
from ring_dilated_attention.ranks.processes import Processes
from ring_dilated_attention.ranks.reduce import all_reduce
from ring_dilated_attention.training.files import check_mine

from .device import describe, exposed, meet, synchronize, timed
from .gate import small_case
from .measure import Sizes, attend, flops_of
from .progress import stepper
from .record import is_record, make_record, markdown, write_record

SUMMARY = "what only several GPUs can show, for others to send us (make multi-gpu)"
NAME, MAKER = "multi_gpu", "python -m benchmarks"
Row = dict[str, Any]  # part, what, passed (None: nothing to judge), found (in words), and what was measured
VERDICTS = {None: "", True: "passed", False: "FAILED"}
KILLED, KILLED_WAITING, RAISES = "is killed", "is killed, and the others wait for their device", "raises"
ALL, WHOLE, SHARE, APART = "all ranks", "one rank, whole length", "one rank, its share of the length", "apart"
SMALL, HANDSHAKE, PAIRS = "small", "handshake", "all pairs at once"
SLACK_SECONDS = 5  # in which a busy machine tears down what a fault broke


class Settings(NamedTuple):
    num_ranks: int
    has_gpus: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)  # the last is timed
    seq_len: int = 251  # of what is compared with the definition: a prime
    head_dim: int = 64
    least_heads: int = 12  # of timed calls. They have a few more, if need be: heads divide among the ranks
    length: int = 16_384  # of each rank in timed calls
    message_bytes: int = 2**28
    fault_rows: int = 8192  # of each rank; with 16 heads of 64 in float32 a chunk has 64 MiB
    timeout: float = 10  # seconds, of the context in which a rank fails
    ways: tuple[str, ...] = ("ring", "all_gather", "all_to_all", "2-D mesh")
    faults: tuple[tuple[str, float], ...] = ((KILLED, 40), (KILLED_WAITING, 60), (RAISES, 40))  # with limits

    @property
    def sizes(self) -> Sizes:
        """Of timed calls."""
        heads = self.num_ranks * -(-self.least_heads // self.num_ranks)
        return Sizes(self.num_ranks * self.length, heads, self.head_dim, self.dtypes[-1])

    @property
    def device_type(self) -> str:
        return "cuda" if self.has_gpus else "cpu"

    def device(self, rank: int) -> str:
        return f"cuda:{rank}" if self.has_gpus else "cpu"

    @property
    def usual_transport(self) -> str:
        """As users name it: a group without the CPU. On two CPU ranks "cuda:gloo" is such a group too."""
        return "nccl" if self.has_gpus else "cuda:gloo"

    def run_ranks(
        self, seconds: float, function: Callable[..., Any], *args: Any, transport: str | None = None, **options: Any
    ) -> list[Any]:
        num_threads = max(1, (os.cpu_count() or 1) // self.num_ranks) if self.has_gpus else 1
        launch = Launch(self.num_ranks, num_threads, has_gpus=self.has_gpus, transport=transport, seconds=seconds)
        return run_ranks(launch, function, self, *args, **options)


QUICK = Settings(
    2, False, (torch.float32,), 37, 8, 2, 64, 2**16, 64, 10, ("ring", "all_to_all"), ((KILLED, 40), (RAISES, 40))
)


class Part(NamedTuple):
    """`run` starts ranks that may take so many seconds, and returns rows."""

    name: str
    seconds: float
    run: Callable[[Settings, float], list[Row]]


def parts(settings: Settings) -> list[Part]:
    has_mesh = settings.num_ranks >= 4 and settings.num_ranks % 2 == 0
    ways = [way for way in settings.ways if way != "2-D mesh" or has_mesh]
    return [
        Part("there", 30, there),
        *(Part(f"right, {way}", 60 if way == "ring" else 35, partial(right, way=way)) for way in ways),
        Part("right, LongNetLM", 40, model),
        Part("network", 60, network),
        *(Part(f"speed, {way}", 70, partial(speed, way=way)) for way in ("ring", "all_gather") if way in ways),
        *(Part(f"fault, {kind}", seconds, partial(fault, kind=kind)) for kind, seconds in settings.faults),
    ]


def run_part(part: Part, settings: Settings) -> list[Row]:
    begun = time.monotonic()
    try:
        rows = part.run(settings, part.seconds)
    except Exception as error:  # noqa: BLE001  whatever it is, the other parts go on
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        rows = [{"what": "all of it", "passed": False, "found": f"it failed: {said}", "error": str(error)[-4000:]}]
    return [{"part": part.name, **row, "part_seconds": time.monotonic() - begun} for row in rows]


def there(settings: Settings, seconds: float) -> list[Row]:
    cards = settings.run_ranks(seconds, _there)
    links = "nvidia-smi did not answer"
    with suppress(OSError, subprocess.SubprocessError):
        links = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=9).stdout
    variables = {name: value for name, value in os.environ.items() if "NCCL" in name or name.startswith("CUDA_")}
    row = {
        "what": "cards and a first message",
        "passed": all(card["sum"] == len(cards) for card in cards),
        "found": f"{len(cards)} x {cards[0]['name']}, NCCL {cards[0]['nccl']}",
        "cards": cards,
        "links": links,
        "variables": variables,
    }
    return [row]


def _there(worker: Worker, settings: Settings) -> Row:
    total = torch.ones(1, device=settings.device(worker.rank))
    dist.all_reduce(total)
    if not settings.has_gpus:
        return {"name": "CPU", "nccl": "none", "sum": total.item()}
    others = [k for k in range(worker.world_size) if k != worker.rank]
    reached = [k for k in others if torch.cuda.can_device_access_peer(worker.rank, k)]
    return describe() | {"nccl": str(torch.cuda.nccl.version()), "sum": total.item(), "reaches_directly": reached}


def right(settings: Settings, seconds: float, way: str) -> list[Row]:
    """Out, lse and all gradients over all ranks, against the definition in float64: the worst of all cases."""
    ranks, rows = settings.run_ranks(seconds, _right, way), []
    for i, dtype in enumerate(settings.dtypes):
        result = worst(cases(settings), dtype, [rank[i] for rank in ranks], settings.device_type)
        found = f"error {result.error:.1e} of at most {result.tolerance:.1e}: {result.where}"
        rows.append({"what": f"{dtype}"[6:], "passed": result.passed, "found": found})
    return rows


def cases(settings: Settings) -> list[Case]:
    """No length divides among the ranks. Heads do. A second call of each case computes while its handshake goes on."""
    n, heads = settings.seq_len, 2 * settings.num_ranks
    causal, sizes = DilatedPattern((n // 8, n), (1, 4), is_causal=True), (n, 1, 2 * heads, heads, settings.head_dim)
    once = [
        Case("causal, zigzag", causal, *sizes, sharding="zigzag"),
        Case("dense causal, zigzag", DilatedPattern((n,), (1,), is_causal=True), *sizes, sharding="zigzag"),
        Case("causal, contiguous", causal, *sizes),
        Case("blocked, not causal", DilatedPattern((n // 3, n), (2, 3), phase="blocked"), *sizes),
        Case("packed documents", causal, *sizes, documents=(0, 1, n // 3, n)),
    ]
    return 2 * once


def _right(worker: Worker, settings: Settings, way: str) -> list[list[Squares]]:
    group = None
    if way == "2-D mesh":
        shape, way = (worker.world_size // 2, 2), "ring"
        group = init_device_mesh(settings.device_type, shape, mesh_dim_names=("ring", "heads"))
    contexts = {x: ContextParallel(group, sharding=x, exchange=way) for x in ("contiguous", "zigzag")}

    def squares(case: Case, dtype: torch.dtype) -> Squares:
        return measure(case, dtype, "auto", settings.device(worker.rank), contexts[case.sharding])

    return [[squares(case, dtype) for case in cases(settings)] for dtype in settings.dtypes]


def model(settings: Settings, seconds: float) -> list[Row]:
    """A step of a LongNetLM. All ranks may err twice as much as one rank, against one in float64.

    The group is that of `init_process_group("nccl", device_id=...)`, and nobody calls `torch.cuda.set_device`.
    """
    transport, rows = settings.usual_transport, []
    ranks = settings.run_ranks(seconds, _model, transport=transport)
    for name, (one, several) in ranks[0][0].items():
        allowed = 2 * one + FLOOR_ON_GPU[torch.float32]
        found = f"error {several:.1e} of at most {allowed:.1e}"
        rows.append({"what": f"{name}, float32, {transport}", "passed": several <= allowed, "found": found})
    cards = "; ".join(f"rank {rank}: {cards}" for rank, (_, cards) in enumerate(ranks))
    found = f"a rank should have a CUDA context on its own card alone: {cards}"
    return [*rows, {"what": "contexts on cards", "passed": None, "found": found}]


def _model(worker: Worker, settings: Settings) -> tuple[dict[str, tuple[float, float]], list[int]]:
    """Relative errors of loss and gradients, on one rank and on all. The cards on which this rank has a context."""
    n, heads = settings.seq_len, 2 * settings.num_ranks
    config = LongNetConfig((n // 8, n), (1, 4), embed_dim=16 * heads, num_heads=heads)
    tokens = torch.randint(256, (1, n), generator=torch.Generator().manual_seed(0))

    def step(device: str, dtype: torch.dtype, parallel: ContextParallel | None = None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        longnet = LongNetLM(config, parallel=parallel).to(device, dtype)
        batch = {"tokens": tokens}
        if parallel is not None:
            batch = parallel.shard_batch(batch if parallel.rank == 0 else None, source=0)
        loss = longnet.loss(batch["tokens"].to(device))
        loss.backward()
        gradient = torch.cat([x.grad.flatten() for x in longnet.parameters() if x.grad is not None])
        if parallel is not None:  # the mean, as DDP and FSDP2 take it
            gradient = all_reduce(parallel.ranks, gradient) / parallel.world_size
        return loss.detach().cpu().double(), gradient.cpu().double()

    device, parallel = settings.device(worker.rank), ContextParallel(sharding="zigzag", exchange="ring")
    found = step(device, torch.float32), step(device, torch.float32, parallel)
    names, exact = ("loss", "gradients"), step("cpu", torch.float64)
    errors = ([float((x - y).norm() / y.norm()) for x, y in zip(one, exact, strict=True)] for one in found)
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # absent from a CPU's torch
    cards = [k for k in range(torch.cuda.device_count()) if has_context is not None and has_context(k)]
    return dict(zip(names, zip(*errors, strict=True), strict=True)), cards


def network(settings: Settings, seconds: float) -> list[Row]:
    """Latencies; large messages of two neighbours alone, of all neighbours at once, of all pairs."""
    ranks = settings.run_ranks(seconds, _network)
    is_right = all(arrived for _, arrived in ranks)
    slowest = {name: max(times[name] for times, _ in ranks) for name in ranks[0][0]}
    small, handshake = slowest.pop(SMALL), slowest.pop(HANDSHAKE)
    said = f"256 bytes take {1e6 * small:.0f} us to the neighbours, a handshake takes {1e6 * handshake:.0f} us"
    rows: list[Row] = [{"what": "latency", "passed": None, "found": said, "small": small, "handshake": handshake}]
    for name, of_swap in slowest.items():
        num_peers = settings.num_ranks - 1 if name == PAIRS else 1
        rate = num_peers * settings.message_bytes / of_swap
        said = f"{rate / 1e9:.3g} GB/s leave a rank, and as many arrive"
        rows.append({"what": f"large, {name}", "passed": is_right, "found": said, "seconds": of_swap})
    return rows


def _network(worker: Worker, settings: Settings) -> tuple[dict[str, float], bool]:
    """The seconds of each exchange, and whether all bytes arrived."""
    parallel, device, p = ContextParallel(exchange="ring"), settings.device(worker.rank), worker.world_size
    assert isinstance(parallel.ranks, Processes)
    link = parallel.ranks.all
    leaves = torch.full((settings.message_bytes,), link.rank, dtype=torch.uint8, device=device)
    comes = [torch.full_like(leaves, 255) for _ in range(p)]

    def swap(to: Iterable[int], sources: Iterable[int], num_bytes: int | None = None) -> float:
        def action() -> None:
            sends = [(leaves[:num_bytes], k) for k in to]
            receives = [(comes[k][:num_bytes], k) for k in sources]
            link.exchange(sends, receives, "messages alone").wait()

        return timed(device, parallel, action)

    following, before = [(link.rank + 1) % p], [(link.rank - 1) % p]
    others = [k for k in range(p) if k != link.rank]
    times = {HANDSHAKE: timed("cpu", parallel, lambda: meet(parallel)), SMALL: swap(following, before, 256)}
    for k in range(p if p > 2 else 1):
        pair = {k, (k + 1) % p}
        peers = pair - {link.rank} if link.rank in pair else set()
        times[f"ranks {k} and {(k + 1) % p} alone"] = swap(peers, peers)
    times["all neighbours at once"] = swap(following, before)
    times[PAIRS] = swap(others, others)
    return times, all(bool((comes[k] == k).all()) for k in others)


def patterns(settings: Settings) -> dict[str, tuple[DilatedPattern, str]]:
    """By name, with the sharding. All ranks share a segment."""
    length, n = settings.length, settings.sizes.seq_len
    dense, dilated = DilatedPattern((n,), (1,), is_causal=True), DilatedPattern((length // 4, n), (1, 8))
    return {"dense causal": (dense, "zigzag"), "dilated": (dilated, "contiguous")}


def speed(settings: Settings, seconds: float, way: str) -> list[Row]:
    """A forward and backward over all ranks: compared with one rank at full size, then timed beside it.

    The ceiling is that of ranks which share nothing: each computes its share of the heads, over the whole length.
    """
    ranks, rows, (n, heads, head_dim, dtype, _) = settings.run_ranks(seconds, _speed, way), [], settings.sizes
    for name, (pattern, _) in patterns(settings).items():
        found, p = [rank[name] for rank in ranks], settings.num_ranks
        allowed = tolerances(small_case(settings.sizes, pattern), dtype, settings.device_type)
        wrong = [x for one in found for x, error in one["errors"].items() if not error <= 2 * allowed[x]]
        every, whole, share, apart = (max(one["seconds"][x] for one in found) for x in (ALL, WHOLE, SHARE, APART))
        jobs = [Job(pattern, make_shards("contiguous", (x,)), heads, heads) for x in (settings.length, n)]
        short, long = (sum(flops_of(make_plan(job, 0), 1, head_dim)) for job in jobs)
        shares = {
            f"of {p} times one rank's speed at the same length": whole / (p * every),
            f"at {p} times the length": (long / p / every) / (short / share),
            "of the ceiling": apart / every,
            "of a step exposed": max(one["exposed"] / one["step"] for one in found),
        }
        said = ", ".join([f"{1e3 * every:.3g} ms", *(f"{share:.0%} {text}" for text, share in shares.items())])
        row = {"what": name, "passed": not wrong, "found": f"wrong at full size: {wrong}" if wrong else said}
        rows.append(row | {"seconds": every, "shares": shares, "ranks": found})
    return rows


def _speed(worker: Worker, settings: Settings, way: str) -> dict[str, Row]:
    (n, heads, head_dim, dtype, _), device = settings.sizes, settings.device(worker.rank)
    found: dict[str, Row] = {}
    for name, (pattern, sharding) in patterns(settings).items():
        parallel = ContextParallel(exchange=way, sharding=sharding)
        whole = torch.randn(4, 1, n, heads, head_dim, dtype=dtype, device=device)
        dist.broadcast(whole, 0)  # query, key, value and the gradient of out, alike on all ranks
        own = parallel.positions(n).to(device)

        def step(x: Tensor, context: ContextParallel | None = None, pattern: DilatedPattern = pattern) -> list[Tensor]:
            inputs = [x[i].requires_grad_() for i in range(3)]
            out = attend(inputs, pattern, context)
            return [out.detach(), *torch.autograd.grad(out, inputs, x[3])]

        local = whole[:, :, own].contiguous()
        pairs = zip(step(local, parallel), (x[:, own] for x in step(whole)), strict=True)
        errors = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs]
        calls: dict[str, Callable[[], object]] = {ALL: partial(step, local, parallel)}
        calls[WHOLE], calls[SHARE] = partial(step, whole), partial(step, whole[:, :, : settings.length].contiguous())
        if worker.rank > 0:
            calls[WHOLE] = calls[SHARE] = lambda: None
        calls[APART] = partial(step, whole[:, :, :, : heads // worker.world_size].contiguous())
        times = {setup: timed(device, parallel, call) for setup, call in calls.items()}
        found[name] = {"errors": dict(zip(("out", "dq", "dk", "dv"), errors, strict=True)), "seconds": times}
        found[name] |= exposed(device, parallel, calls[ALL])
        parallel.close()
    return found


class StruckError(Exception):
    """The failing rank's own error."""


def fault(settings: Settings, seconds: float, kind: str) -> list[Row]:
    """The last rank fails in the middle of a hop: what the others said, and after how many seconds."""
    said: dict[tuple[int, str], Any] = {}
    failures, last = "", settings.num_ranks - 1
    with TemporaryDirectory() as folder:
        try:
            hear = lambda rank, words: said.update({(rank, words[0]): words[1]})  # noqa: E731
            settings.run_ranks(seconds, _fault, kind, Path(folder), on_report=hear)
        except RankFailedError as raised:
            failures = str(raised)
    ended, others = time.monotonic(), []
    if (struck := said.get((last, "struck"))) is None:
        raise RuntimeError(f"rank {last} never came to the place where it was to fail: {failures}")
    by_rank = dict(line.split(": ", 1) for line in failures.splitlines() if line.startswith("rank ") and ": " in line)
    for rank in range(last):
        without = ("no error", by_rank.get(f"rank {rank}", "it went on"), ended)
        error, message, when = said.get((rank, "error"), without)
        others.append({"rank": rank, "error": error, "message": message, "seconds": when - struck})
        others[-1]["device_seconds"] = said.get((rank, "device"))  # from its error until its device was idle
    found = "; ".join("rank {rank}: {error} after {seconds:.1f} s: {message}".format_map(one) for one in others)
    row = {"what": f"rank {last} {kind}", "passed": all(is_told(settings, kind, one) for one in others), "found": found}
    return [row | {"others": others, "failures": failures[-4000:]}]


def is_told(settings: Settings, kind: str, one: Row) -> bool:
    """Whether a rank heard of the fault in time. If it waits for its device, it is enough that something ended it."""
    if kind == KILLED_WAITING:  # NCCL's watchdog ends the messages, or the process
        return one["device_seconds"] is not None or one["message"] == "died without a word"
    in_time = one["seconds"] <= settings.timeout + SLACK_SECONDS
    return one["error"] == ExchangeError.__name__ and one["device_seconds"] is not None and in_time


def _fault(worker: Worker, settings: Settings, kind: str, folder: Path) -> None:
    device, p = settings.device(worker.rank), worker.world_size
    parallel = ContextParallel(exchange="ring", timeout=timedelta(seconds=settings.timeout))
    x = torch.ones(1, settings.fault_rows, 16, 64, device=device, requires_grad=True)
    try:
        for number in range(3):
            if worker.rank == p - 1 and number == 1:
                _strike_in_a_hop(kind, worker.report)
            out = attend([x, x, x], DilatedPattern.dense(), parallel)
            synchronize(device if kind == KILLED_WAITING else "cpu")
            torch.autograd.grad(out, x, torch.ones_like(out))
            synchronize(device if kind == KILLED_WAITING else "cpu")
    except (RuntimeError, StruckError) as error:
        worker.report(("error", (type(error).__name__, str(error), begun := time.monotonic())))
        synchronize(device)
        worker.report(("device", time.monotonic() - begun))
    # A process that ends closes its connections. The others must hear of the fault before.
    (folder / str(worker.rank)).touch()
    until = time.monotonic() + settings.timeout + SLACK_SECONDS
    while len(list(folder.iterdir())) < p - (kind != RAISES) and time.monotonic() < until:
        time.sleep(0.05)


def _strike_in_a_hop(kind: str, report: Callable[[Any], None]) -> None:
    post = GroupLink._post

    def failing(link: GroupLink, messages: Any, moment: str) -> Any:
        pending = post(link, messages, moment)
        if messages and moment.startswith("forward, hop 1"):
            report(("struck", time.monotonic()))
            if kind == RAISES:
                raise StruckError("the failing rank's own error")
            os.kill(os.getpid(), 9)
        return pending

    GroupLink._post = failing  # type: ignore[method-assign,assignment]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"{MAKER} {NAME}", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two CPU ranks; writes nothing unless --results is given")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where the record goes (default: runs)")
    arguments = parser.parse_args(words)
    settings, folder = QUICK, arguments.results
    if not arguments.quick:
        settings, folder = Settings(torch.cuda.device_count()), folder or Path("runs")
        if settings.num_ranks < 2:
            raise ValueError(f"{NAME} needs two CUDA GPUs or more, and torch sees {settings.num_ranks}.")
    if folder is not None:
        check_mine(folder / f"{NAME}.json", is_record, MAKER)
    rows = run(settings, folder)
    for row in rows:
        print(f"{VERDICTS[row['passed']]:6} {row['part']}: {row['what']}: {row['found']}")
    if folder is not None:
        print(f"\nPlease open an issue with this file: {folder / NAME}.json")
    return int(any(row["passed"] is False for row in rows))


def run(settings: Settings, folder: Path | None) -> list[Row]:
    """The rows of all parts. The record is written whenever a part ends."""
    rows: list[Row] = []
    step = stepper(NAME)
    for part in parts(settings):
        step(part.name)
        rows += run_part(part, settings)
        if folder is not None:
            card = rows[0]["cards"][0] if settings.has_gpus and "cards" in rows[0] else None
            write_record(make_record(NAME, rows, is_quick=not settings.has_gpus, gpu=card), folder)
    return rows


def table(rows: list[Row]) -> str:
    lines = [(row["part"], row["what"], VERDICTS[row["passed"]], " ".join(row["found"].split())) for row in rows]
    return markdown(("part", "what", "verdict", "found"), lines)

"""How long a step takes on given hardware: the programs of all ranks, in virtual time. Numbers only, no torch.

All ranks run together, so that a rank that is late makes its neighbours wait. Exposed is the time in which a rank waits
for messages, be it that they are slow or that their sender is late.

What is assumed:

- Computation: a tile takes its FLOPs over a rate of the forward and one of the backward (the same, if only one is
  known), and what a call takes besides. Give the rate that kernels reach, not the peak; packing, merging and adding are
  part of it. Messages take nothing from it, and posting them no time.
- Links: a rank has one way out and one way in, each of so many bytes per second, whoever the peers are. On each,
  messages go one after the other, in the order in which the rank posts them (as on one NCCL stream). A message starts
  when both of its ranks have posted it and both ways are free; it is there, for both, when its bytes have passed and
  one latency.
- Handshake: before a forward, and before its backward, every rank waits for the slowest one, and one latency (or
  what a handshake was measured to take).

So every moment is a maximum of sums of durations, and nothing that becomes faster makes a step slower.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..plan.dealing import Dealing
from ..plan.plan import Message, Plan
from ..plan.program import make_program
from ..plan.sizes import Sizes
from ..plan.step import STAGES, BufferSlice, Compute, Deal, Post, Terms, Wait
from .ledger import row_bytes


class Hardware(NamedTuple):
    """One device's rate, one way of its link, and what any message takes besides.

    backward_flops_per_second: where it differs from the forward's.
    call_seconds: of every kernel call, whatever its size.
    handshake_seconds: of a handshake; one latency where nothing else is known.
    """

    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float = 0.0
    backward_flops_per_second: float | None = None
    call_seconds: float = 0.0
    handshake_seconds: float | None = None

    def compute_seconds(self, flops: float, *, backward: bool, calls: int = 1) -> float:
        rate = self.flops_per_second
        if backward and self.backward_flops_per_second is not None:
            rate = self.backward_flops_per_second
        return flops / rate + calls * self.call_seconds

    def work_seconds(self, num_pairs: int, sizes: Sizes) -> float:
        """Of so many pairs of queries and keys, forward and backward, in one kernel call each."""
        return sum(
            self.compute_seconds(2 * products * sizes.unit * num_pairs, backward=products == 5) for products in (2, 5)
        )

    @property
    def handshake(self) -> float:
        return self.latency_seconds if self.handshake_seconds is None else self.handshake_seconds


class RankTime(NamedTuple):
    """One rank's seconds. A stage begins when all ranks have ended the one before.

    computing_seconds, exposed_seconds: of both stages; exposed in messages and handshakes. In the rest of a step a rank
        is done before the slowest one.
    """

    forward_seconds: float
    backward_seconds: float
    computing_seconds: float
    exposed_seconds: float


class StepTime(NamedTuple):
    """One forward and its backward, of all ranks."""

    ranks: tuple[RankTime, ...]

    @property
    def forward_seconds(self) -> float:
        return max(rank.forward_seconds for rank in self.ranks)

    @property
    def backward_seconds(self) -> float:
        return max(rank.backward_seconds for rank in self.ranks)

    @property
    def step_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def efficiency(self) -> float:
        """T1 / (p Tp). One rank computes the same tiles' pairs and waits for nobody, so T1 is the sum of computing."""
        return self._mean_computing / self.step_seconds if self.step_seconds else 1.0

    @property
    def balance(self) -> float:
        """Mean work over the largest: the efficiency if nobody waited for messages."""
        largest = max(rank.computing_seconds for rank in self.ranks)
        return self._mean_computing / largest if largest else 1.0

    @property
    def _mean_computing(self) -> float:
        return sum(rank.computing_seconds for rank in self.ranks) / len(self.ranks)


def model_step(
    plans: Sequence[Plan], sizes: Sizes, hardware: Hardware, dealings: Sequence[Dealing] | None = None
) -> StepTime:
    """The time of a step, under a kernel that gives the results of one tile at a time.

    Args:
        plans: every rank's, in the order of ranks.
        dealings: every rank's, where heads are dealt for positions.
    """
    network = Network(len(plans), hardware)
    ranks = [_Rank(i, plan, network, sizes, None if dealings is None else dealings[i]) for i, plan in enumerate(plans)]
    handshake = hardware.handshake if len(plans) > 1 else 0.0
    start, seconds = 0.0, []
    for stage in STAGES:
        for rank in ranks:
            rank.now = start
            rank.wait_until(start + handshake)
        _run([rank.carry_out(stage) for rank in ranks], network)
        seconds.append([rank.now - start for rank in ranks])
        start = max(rank.now for rank in ranks)
    return StepTime(tuple(RankTime(f, b, r.computing, r.exposed) for f, b, r in zip(*seconds, ranks, strict=True)))


def _run(loops: Sequence[Iterator[None]], network: "Network") -> None:
    """Advance all ranks' loops in turn; each stops where the end of its wait is not known yet."""
    running = list(loops)
    while running:
        before = len(running), network.num_carried
        running = [loop for loop in running if next(loop, "ended") is None]
        assert (len(running), network.num_carried) != before, "ranks wait for each other: not the plans of one job"


# Of 2 * D operations per pair each, as `Plan.flops` counts them.
_PRODUCTS = {"partial": 2, "gradients": 5, "dq": 2, "dk and dv": 3}


class _Rank:
    """A rank's clock, and what it did until now."""

    def __init__(self, number: int, plan: Plan, network: "Network", sizes: Sizes, dealing: Dealing | None) -> None:
        self.number, self.plan, self.network = number, plan, network
        self.sizes, self.dealing = sizes, dealing
        self.now = self.computing = self.exposed = 0.0

    def carry_out(self, stage: str) -> Iterator[None]:
        """The program of a stage. Stops where the end of a wait is not known yet."""
        posted: dict[str, tuple[list[Side], list[Side]]] = {}
        terms = Terms(batch=self.sizes.batch, dealing=self.dealing)
        for step in make_program(self.plan, stage, terms):
            if isinstance(step, Compute):
                self.compute(step)
            elif isinstance(step, Post):
                posted[step.ticket] = self.post(step)
            elif isinstance(step, Wait):
                sent, received = posted[step.ticket]
                yield from self.wait([*(sent if step.sent else ()), *(received if step.received else ())])
            elif isinstance(step, Deal):
                yield from self.wait(self.deal(step))

    def compute(self, step: Compute) -> None:
        entries = self.sizes.batch if step.entry is None else 1
        flops = _PRODUCTS[step.what] * 2 * self.sizes.head_dim * entries * step.tile.pairs
        seconds = self.network.hardware.compute_seconds(flops, backward=step.what != "partial")
        self.now += seconds
        self.computing += seconds

    def post(self, step: Post) -> tuple[list["Side"], list["Side"]]:
        def sides(parts: Sequence[BufferSlice]) -> list[Side]:
            return [Side(self.address(x.message.peer), self.num_bytes(x.message), self.now) for x in parts]

        return self.network.post(self.number, sides(step.sends), sides(step.receives))

    def address(self, peer: int) -> int:
        """The number of a rank of the ring. Where heads are dealt there is a ring for each place."""
        return peer if self.dealing is None else peer * self.dealing.size + self.dealing.place

    def num_bytes(self, message: Message) -> int:
        itemsize = self.sizes.sum_itemsize if message.is_gradient else self.sizes.itemsize
        return message.size * self.sizes.unit * itemsize

    def deal(self, step: Deal) -> list["Side"]:
        assert self.dealing is not None
        place, lengths = self.dealing.place, self.dealing.lengths
        row = self.sizes.batch * row_bytes(step.name, self.plan, self.sizes)
        first = self.number - place
        leaves, comes = [], []
        for peer, length in enumerate(lengths):
            if peer != place:
                there, back = (lengths[place], length) if step.to_heads else (length, lengths[place])
                leaves += [Side(first + peer, there * row, self.now)] if there else []
                comes += [Side(first + peer, back * row, self.now)] if back else []
        sent, received = self.network.post(self.number, leaves, comes)
        return [*sent, *received]

    def wait(self, sides: Sequence["Side"]) -> Iterator[None]:
        for side in sides:
            while side.done is None:
                yield
            self.wait_until(side.done)

    def wait_until(self, moment: float) -> None:
        self.exposed += max(moment - self.now, 0.0)
        self.now = max(moment, self.now)


@dataclass
class Side:
    """A message as one of its ranks posted it. `done` is the moment at which it is through, once that is known."""

    peer: int
    num_bytes: int
    posted: float
    done: float | None = None


class Network:
    """The ways out of and into every rank, each with its messages in the order in which the rank posted them.

    All ranks order messages alike (by hop, then by ring), so the first message of some way is always the first of its
    peer's way too, and none blocks another for good.
    """

    def __init__(self, num_ranks: int, hardware: Hardware) -> None:
        self.hardware = hardware
        self.leaving: list[deque[Side]] = [deque() for _ in range(num_ranks)]
        self.coming: list[deque[Side]] = [deque() for _ in range(num_ranks)]
        self.out_free, self.in_free = [0.0] * num_ranks, [0.0] * num_ranks
        self.num_carried = 0

    def post(self, rank: int, sends: list[Side], receives: list[Side]) -> tuple[list[Side], list[Side]]:
        self.leaving[rank].extend(sends)
        self.coming[rank].extend(receives)
        senders = [rank, *(side.peer for side in receives)]
        while senders:
            sender = senders.pop()
            while self.leaving[sender]:
                receiver = self.leaving[sender][0].peer
                if not self.coming[receiver] or self.coming[receiver][0].peer != sender:
                    break
                self._carry(sender, receiver)
                senders += [side.peer for side in list(self.coming[receiver])[:1]]
        return sends, receives

    def _carry(self, sender: int, receiver: int) -> None:
        """Carry the first message of both ways."""
        sent, received = self.leaving[sender].popleft(), self.coming[receiver].popleft()
        assert sent.num_bytes == received.num_bytes, (sender, sent, receiver, received)
        start = max(sent.posted, received.posted, self.out_free[sender], self.in_free[receiver])
        passed = start + sent.num_bytes / self.hardware.bytes_per_second
        self.out_free[sender] = self.in_free[receiver] = passed
        sent.done = received.done = passed + self.hardware.latency_seconds
        self.num_carried += 1


def time_text(seconds: float) -> str:
    """From nanoseconds to years, three digits of them."""
    steps = ((365.25 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    size, unit = next((step for step in steps if seconds >= step[0]), (1e-9, "ns"))
    number = seconds / size
    return (f"{number:,.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}") if seconds else "0 s"

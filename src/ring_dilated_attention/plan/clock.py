"""How long a step takes on given hardware: the ring loop of every rank, in virtual time. Numbers only, no torch.

`_forward` and `_backward` follow `exchange/ring.py` line by line: what they post and wait for, and when. All ranks run
together, so that a rank that is late makes its neighbours wait. Exposed is the time in which a rank waits for messages,
be it that they are slow or that their sender is late.

What is assumed:

- Computation: a tile takes its FLOPs over one rate, forward and backward alike. Give the rate that the kernels reach,
  not the peak; packing, merging and adding are part of it. Messages take nothing from it, and posting them no time.
- Links: a rank has one way out and one way in, each of so many bytes per second, whoever the peers are. On each,
  messages go one after the other, in the order in which the rank posts them (as on one NCCL stream). A message starts
  when both of its ranks have posted it and both ways are free; it is there, for both, when its bytes have passed and
  one latency.
- Handshake: before a forward, and before its backward, every rank waits for the slowest one, and one latency.
- Gradients that earlier ranks summed are waited for after a hop's first tile, as under the composed kernels.

So every moment is a maximum of sums of durations, and nothing that becomes faster makes a step slower.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .plan import Message, Plan, Tile


class Hardware(NamedTuple):
    """One device's rate, one way of its link, and what any message takes besides."""

    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float = 0.0


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
        whole = len(self.ranks) * self.step_seconds
        return sum(rank.computing_seconds for rank in self.ranks) / whole if whole else 1.0

    @property
    def balance(self) -> float:
        """Mean work over the largest: the efficiency if nobody waited for messages."""
        largest = max(rank.computing_seconds for rank in self.ranks)
        return sum(r.computing_seconds for r in self.ranks) / (len(self.ranks) * largest) if largest else 1.0


def model_step(plans: Sequence[Plan], batch: int, head_dim: int, itemsize: int, hardware: Hardware) -> StepTime:
    """The time of a step.

    Args:
        plans: every rank's, in the order of ranks.
        itemsize: bytes of an element of query, key and value. Gradients travel with at least 4.
    """
    network = Network(len(plans), hardware)
    ranks = [_Rank(plan, network, batch * head_dim, itemsize, hardware.flops_per_second) for plan in plans]
    handshake = hardware.latency_seconds if len(plans) > 1 else 0.0
    start, seconds = 0.0, []
    for stage in (_forward, _backward):
        for rank in ranks:
            rank.now = start
            rank.wait_until(start + handshake)
        _run([stage(rank) for rank in ranks], network)
        seconds.append([rank.now - start for rank in ranks])
        start = max(rank.now for rank in ranks)
    return StepTime(tuple(RankTime(f, b, r.computing, r.exposed) for f, b, r in zip(*seconds, ranks, strict=True)))


def _forward(rank: "_Rank") -> Iterator[None]:
    plan = rank.plan
    moving = rank.start(0)
    rank.compute(plan.local, products=2)
    for s, hop in enumerate(plan.hops):
        yield from rank.wait(moving)
        moving = rank.start(s + 1)
        rank.compute(hop.tiles, products=2)


def _backward(rank: "_Rank") -> Iterator[None]:
    plan = rank.plan
    moving = rank.start(0)
    rank.compute(plan.local, products=5)
    leaving, arriving = list[Side](), list[Side]()
    for s, hop in enumerate(plan.hops):
        yield from rank.wait(moving)
        moving = rank.start(s + 1)
        rank.compute(hop.tiles[:1], products=5)
        yield from rank.wait(arriving)
        rank.compute(hop.tiles[1:], products=5)
        yield from rank.wait(leaving)
        leaving = rank.post([m for m in hop.grad_sends if m.peer == m.owner], ())
        yield from rank.wait(rank.post((), [m for m in hop.grad_receives if m.owner == plan.rank]))
        leaving += rank.post([m for m in hop.grad_sends if m.peer != m.owner], ())
        arriving = rank.post((), [m for m in hop.grad_receives if m.owner != plan.rank])
    yield from rank.wait(leaving)


def _run(loops: Sequence[Iterator[None]], network: "Network") -> None:
    """Advance all ranks' loops in turn; each stops where the end of its wait is not known yet."""
    running = list(loops)
    while running:
        before = len(running), network.num_carried
        running = [loop for loop in running if next(loop, "ended") is None]
        assert (len(running), network.num_carried) != before, "ranks wait for each other: not the plans of one job"


class _Rank:
    """A rank's clock, and what it did until now."""

    def __init__(self, plan: Plan, network: "Network", unit: int, itemsize: int, flops_per_second: float) -> None:
        self.plan, self.network = plan, network
        self.unit, self.itemsize, self.flops_per_second = unit, itemsize, flops_per_second
        self.now = self.computing = self.exposed = 0.0

    def compute(self, tiles: Sequence[Tile], products: int) -> None:
        """Matrix products of 2 * D operations per pair, as `Plan.flops` counts them."""
        seconds = products * 2 * self.unit * sum(tile.pairs for tile in tiles) / self.flops_per_second
        self.now += seconds
        self.computing += seconds

    def start(self, s: int) -> list["Side"]:
        if s >= len(self.plan.hops):
            return []
        return self.post(self.plan.hops[s].sends, self.plan.hops[s].receives)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> list["Side"]:
        def sides(messages: Sequence[Message]) -> list[Side]:
            return [Side(m.peer, self.num_bytes(m), self.now) for m in messages]

        return self.network.post(self.plan.rank, sides(sends), sides(receives))

    def num_bytes(self, message: Message) -> int:
        return message.size * self.unit * (max(self.itemsize, 4) if message.is_gradient else self.itemsize)

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

    def post(self, rank: int, sends: Sequence[Side], receives: Sequence[Side]) -> list[Side]:
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
        return [*sends, *receives]

    def _carry(self, sender: int, receiver: int) -> None:
        """Carry the first message of both ways."""
        sent, received = self.leaving[sender].popleft(), self.coming[receiver].popleft()
        assert sent.num_bytes == received.num_bytes, (sender, sent, receiver, received)
        start = max(sent.posted, received.posted, self.out_free[sender], self.in_free[receiver])
        passed = start + sent.num_bytes / self.hardware.bytes_per_second
        self.out_free[sender] = self.in_free[receiver] = passed
        sent.done = received.done = passed + self.hardware.latency_seconds
        self.num_carried += 1

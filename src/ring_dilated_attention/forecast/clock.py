"""Predicts how long a step takes on given hardware: it runs the programs of all ranks in virtual time. No torch.

A step has two stages, a forward and its backward. A program is the list of what a rank does in a stage: it computes
tiles (blocks of queries x keys), posts messages and waits for messages.

Assumptions:

- Computation: a tile takes `call_seconds`, plus its FLOPs divided by the FLOPs per second of the stage. This rate is
  what kernels reach in practice: packing rows and adding up results count as part of a tile. Messages do not slow
  computation. Posting a message takes no time.
- Network: a rank sends one message at a time and receives one at a time, each at `bytes_per_second`. Messages go in the
  order in which the rank posts them, as on one NCCL stream. A message starts when its sender and its receiver have
  posted it, and neither is busy with an earlier message. It arrives one latency after its last byte has left.
- Hosts: consecutive ranks share a host. Messages inside a host may have different rates from messages between hosts.
- Handshake: before each stage every rank waits for the slowest rank, and for a few rounds of messages after which every
  rank has heard from all others (`plan/rounds.py`). Each round takes one latency. But for the first
  round, a measured time may be given.

If a tile or a message takes less time, nothing happens later than before. So faster hardware never makes a step slower.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..plan.exchange import RankPlan
from ..plan.plan import Message, Plan
from ..plan.program import make_program
from ..plan.rounds import num_rounds
from ..plan.step import STAGES, CallFacts, Compute, Deal, Post, Sizes, Wait


class Hardware(NamedTuple):
    """The rates of a rank's device and of its network. `bytes_per_second` is for each of the two directions.

    If `gpus_per_host` is given, the network inside a host has rates of its own.
    """

    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float = 0.0
    backward_flops_per_second: float | None = None  # None: the same rate as in a forward
    # The seconds that every kernel call takes in addition to the time of its FLOPs.
    call_seconds: float = 0.0
    # The measured seconds of the first round of a handshake. None: one latency, as for each further round.
    handshake_seconds: float | None = None
    # The number of ranks on a host. None: one network joins all ranks, and the next two fields are not read.
    gpus_per_host: int | None = None
    host_bytes_per_second: float | None = None  # the rate of messages inside a host
    host_latency_seconds: float = 0.0  # the latency of messages inside a host

    def network(self, first: int, last: int) -> tuple[float, float]:
        """The bytes per second and the latency of the network that joins the ranks from `first` to `last`.

        It is the network inside a host if both ranks are on one host.
        """
        size = self.gpus_per_host
        inside = self.host_bytes_per_second
        if size is not None and inside is not None and first // size == last // size:
            return inside, self.host_latency_seconds
        return self.bytes_per_second, self.latency_seconds

    def handshake(self, num_ranks: int) -> float:
        """The seconds that a handshake of ranks 0 to `num_ranks` - 1 takes."""
        _, latency = self.network(0, num_ranks - 1)
        first_round = self.handshake_seconds
        if first_round is None:
            first_round = latency
        return first_round + (num_rounds(num_ranks) - 1) * latency


class RankTime(NamedTuple):
    """The seconds of one rank in a step.

    forward_seconds and backward_seconds are the times of the two stages. The backward begins when all ranks have ended
    the forward.

    computing_seconds and exposed_seconds are sums over the two stages. Exposed time is spent in waits: for handshakes,
    slow messages and late senders.
    """

    forward_seconds: float
    backward_seconds: float
    computing_seconds: float
    exposed_seconds: float


class StepTime(NamedTuple):
    """The time of one forward and its backward."""

    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    ranks: tuple[RankTime, ...]


def model_step(plans: Sequence[RankPlan], sizes: Sizes, hardware: Hardware) -> StepTime:
    """The time of a step with a kernel that computes one tile at a time. plans: the ranks' plans, in order."""
    num_ranks = len(plans)
    network = Network(num_ranks, hardware)
    ranks = [_Rank(number, plan, network, sizes) for number, plan in enumerate(plans)]
    handshake = hardware.handshake(num_ranks) if num_ranks > 1 else 0.0
    start = 0.0
    seconds_of_stages = []
    for stage in STAGES:
        for rank in ranks:
            rank.now = start
            rank.wait_until(start + handshake)
        running = [rank.carry_out(stage) for rank in ranks]
        while running:  # each rank runs until it waits for a message whose arrival is not known yet
            before = len(running), network.num_carried
            running = [loop for loop in running if next(loop, "ended") is None]
            assert (len(running), network.num_carried) != before, (
                "ranks wait for each other: these are not the plans of one call"
            )
        seconds_of_stages.append([rank.now - start for rank in ranks])
        start = max(rank.now for rank in ranks)
    forward, backward = seconds_of_stages
    times = [
        RankTime(f, b, r.computing, r.exposed)
        for f, b, r in zip(forward, backward, ranks, strict=True)
    ]
    longest = max(forward), max(backward)
    return StepTime(*longest, sum(longest), tuple(times))


# The number of matrix products in a tile of a forward ("partial") and of a backward ("gradients"). A product takes
# 2 * head_dim FLOPs for each (query, key) pair.
_PRODUCTS = {"partial": 2, "gradients": 5}


class _Rank:
    """A rank's clock, and how long it has computed and waited."""

    def __init__(self, number: int, plan: RankPlan, network: "Network", sizes: Sizes) -> None:
        self.number = number
        self.plan, self.dealing = plan
        self.network = network
        self.sizes = sizes
        self.now = 0.0
        self.computing = 0.0
        self.exposed = 0.0

    def carry_out(self, stage: str) -> Iterator[None]:
        """Run the rank's program of a stage. Yields whenever the rank waits for a message and the time of arrival is
        not known yet."""
        posted: dict[str, tuple[list[Side], list[Side]]] = {}
        facts = CallFacts(batch=self.sizes.batch, dealing=self.dealing)
        for step in make_program(self.plan, stage, facts):
            if isinstance(step, Compute):
                self.compute(step)
            elif isinstance(step, Post):
                posted[step.ticket] = self.post(step)
            elif isinstance(step, Wait):
                sent, received = posted[step.ticket]
                if step.sent:
                    yield from self.wait(sent)
                if step.received:
                    yield from self.wait(received)
            elif isinstance(step, Deal):
                yield from self.wait(self.deal(step))

    def compute(self, step: Compute) -> None:
        entries = self.sizes.batch if step.entry is None else 1
        flops = _PRODUCTS[step.what] * 2 * self.sizes.head_dim * entries * step.tile.pairs
        hardware = self.network.hardware
        rate = hardware.flops_per_second
        if step.what == "gradients" and hardware.backward_flops_per_second is not None:
            rate = hardware.backward_flops_per_second
        seconds = flops / rate + hardware.call_seconds
        self.now += seconds
        self.computing += seconds

    def post(self, step: Post) -> tuple[list["Side"], list["Side"]]:
        # If groups of ranks use all_to_all, ring k joins the k-th ranks of all groups. So the plan names a peer by the
        # number of the peer's group, and `side` turns this number into the peer's rank.
        size = 1
        place = 0
        if self.dealing is not None:
            size = self.dealing.size
            place = self.dealing.place

        def side(message: Message) -> Side:
            itemsize = self.sizes.itemsize
            if message.is_gradient:
                itemsize = self.sizes.sum_itemsize
            num_bytes = message.size * self.sizes.unit * itemsize
            return Side(message.peer * size + place, num_bytes, self.now)

        sends = [side(x.message) for x in step.sends]
        receives = [side(x.message) for x in step.receives]
        self.network.post(self.number, sends, receives)
        return sends, receives

    def deal(self, step: Deal) -> list["Side"]:
        assert self.dealing is not None
        place = self.dealing.place
        first = self.number - place
        row = self.sizes.batch * _row_bytes(step.name, self.plan, self.sizes)
        sends = []
        receives = []
        for other, num_rows in enumerate(self.dealing.lengths):
            if other == place:
                continue
            leaving, coming = self.dealing.lengths[place], num_rows
            if not step.to_heads:
                leaving, coming = coming, leaving
            if leaving:
                sends.append(Side(first + other, leaving * row, self.now))
            if coming:
                receives.append(Side(first + other, coming * row, self.now))
        self.network.post(self.number, sends, receives)
        return sends + receives

    def wait(self, sides: Sequence["Side"]) -> Iterator[None]:
        for side in sides:
            while side.done is None:
                yield
            self.wait_until(side.done)

    def wait_until(self, moment: float) -> None:
        self.exposed += max(moment - self.now, 0.0)
        self.now = max(moment, self.now)


def _row_bytes(name: str, plan: Plan, sizes: Sizes) -> int:
    """The bytes of one position of a tensor, all heads together. name: "key" or "lse", for example."""
    num_heads = plan.num_kv_heads if name in ("key", "value", "dk", "dv") else plan.num_heads
    if name in ("lse", "dlse"):
        return num_heads * sizes.sum_itemsize
    return num_heads * sizes.head_dim * sizes.itemsize


@dataclass
class Side:
    """One end of a message: its sender or its receiver. peer: the rank at the other end.

    posted: the moment at which the rank at this end posted the message. done: the moment at which the message
    arrives; None until this moment is known.
    """

    peer: int
    num_bytes: int
    posted: float
    done: float | None = None


class Network:
    """Holds two queues for each rank: one of messages to send, one of messages to receive, both in the order of
    posting.

    All ranks order messages alike (by the step of the ring exchange, then by ring). So there is always a message that
    is first in both its sender's and its receiver's queue, and the ranks cannot deadlock.
    """

    def __init__(self, num_ranks: int, hardware: Hardware) -> None:
        self.hardware = hardware
        self.leaving: list[deque[Side]] = [deque() for _ in range(num_ranks)]
        self.coming: list[deque[Side]] = [deque() for _ in range(num_ranks)]
        self.out_free = [0.0] * num_ranks
        self.in_free = [0.0] * num_ranks
        self.num_carried = 0

    def post(self, rank: int, sends: list[Side], receives: list[Side]) -> None:
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

    def _carry(self, sender: int, receiver: int) -> None:
        """Compute when a message arrives, and remove it from both queues. The message must be first in the queue of
        `sender` and in that of `receiver`."""
        sent = self.leaving[sender].popleft()
        received = self.coming[receiver].popleft()
        assert sent.num_bytes == received.num_bytes, (sender, sent, receiver, received)
        start = max(sent.posted, received.posted, self.out_free[sender], self.in_free[receiver])
        bytes_per_second, latency = self.hardware.network(sender, receiver)
        passed = start + sent.num_bytes / bytes_per_second
        self.out_free[sender] = self.in_free[receiver] = passed
        sent.done = received.done = passed + latency
        self.num_carried += 1


def time_text(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds * 1e6:.1f} µs"

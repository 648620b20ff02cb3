"""Lists the meshes that a given number of devices can form. Meshes that fit the memory come first. Of these, the
mesh on which training reads the most tokens per second is at the top.

A mesh of data x sequence devices has `data` groups. Each sequence is split over the `sequence` devices of a group.

For each mesh, the exchange and sharding with the fastest attention are taken. Two more questions are decided: whether
activations are kept or recomputed, and whether states (parameters, gradients and optimiser state) are whole on each
device or cut over all devices. The fastest combination that fits the memory is taken.
"""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from ..pattern import DilatedPattern
from ..plan.step import Sizes
from ..simulate.weighing import DTYPES, AttentionWeight
from .call_cost import MOST_TIMED, Exchange, Figures, PlannedCall, forecast
from .clock import Hardware
from .exchanges import alternatives
from .model_weight import ACTIVATIONS, FLOAT, Decoder, ModelMemory, model_memory, weigh_activations


class Training(NamedTuple):
    """The training of a decoder. batch: how many sequences each group of devices reads in a step."""

    decoder: Decoder
    pattern: DilatedPattern
    seq_len: int
    batch: int
    itemsize: int  # the bytes of one number in activations
    kernel: str
    activations: tuple[str, ...] = ACTIVATIONS  # which of ACTIVATIONS are compared


class Mesh(NamedTuple):
    """`data` groups of devices. Each sequence is split over the `sequence` devices of a group."""

    data: int
    sequence: int

    @property
    def num_ranks(self) -> int:
        return self.data * self.sequence

    def __str__(self) -> str:
        return f"{self.data}x{self.sequence}"


class MeshPlan(NamedTuple):
    """A mesh, and the best way to train a model on it. All times are in seconds for one step."""

    mesh: Mesh
    exchange: Exchange
    sharding: str
    activations: str  # one of ACTIVATIONS: what is done with activations
    is_cut: bool  # whether FSDP2 cuts parameters, gradients and optimiser state over all devices
    memory: ModelMemory
    fits: bool
    matrices_seconds: float
    attention_seconds: float
    gradients_seconds: float
    seconds: float
    tokens_per_second: float


def all_meshes(num_ranks: int, seq_len: int) -> list[Mesh]:
    most = min(num_ranks, seq_len, MOST_TIMED)
    return [Mesh(num_ranks // size, size) for size in range(1, most + 1) if num_ranks % size == 0]


def ranked_meshes(
    training: Training,
    num_ranks: int,
    hardware: Hardware,
    memory_bytes: float,
    step: Callable[[], object] = lambda: None,
) -> list[MeshPlan]:
    """Plan every mesh. Returns the plans that fit the memory, the fastest first, and then all other plans.

    step: a function that is called after each mesh, to show progress.
    """
    plans = []
    for mesh in all_meshes(num_ranks, training.seq_len):
        plans.append(plan_mesh(training, mesh, hardware, memory_bytes))
        step()
    return sorted(plans, key=_rank_of)


def _rank_of(plan: MeshPlan) -> tuple[bool, float]:
    """The key by which plans are sorted. Plans that fit the memory come first, the fastest at the top. All other plans
    follow, with the least memory at the top."""
    if plan.fits:
        return False, -plan.tokens_per_second
    return True, plan.memory.total


def plan_mesh(training: Training, mesh: Mesh, hardware: Hardware, memory_bytes: float) -> MeshPlan:
    """Find the fastest way to train on `mesh` within `memory_bytes`. If no way fits, take the one that needs least
    memory.

    The time of a step has three parts: products with weights, attention in all layers, and the messages that exchange
    gradients or parameters. The optimiser's own work is not counted.
    """
    decoder = training.decoder
    exchange, sharding, attention, weight = _attention(training, mesh, hardware)
    attention_seconds = decoder.num_layers * attention.seconds
    rows = -(-training.seq_len // mesh.sequence)
    product_flops = 2 * training.batch * rows * decoder.matrix_entries
    tokens = training.batch * mesh.data * training.seq_len
    held_bytes = weigh_activations(decoder, training.batch, rows, DTYPES[training.itemsize], weight)
    plans = []
    for activations, is_cut in product(training.activations, (False, True)):
        if is_cut and mesh.num_ranks == 1:
            continue
        num_shards = mesh.num_ranks if is_cut else 1
        memory = model_memory(decoder, held_bytes[activations], num_shards, training.itemsize)
        times = 3  # a forward, and a backward with twice as many products as the forward
        if activations != "kept":  # the backward computes the forward again, except attention
            times += 1
        matrices_seconds = times * product_flops / hardware.flops_per_second
        gradients_seconds = _gradient_seconds(training, mesh, hardware, is_cut=is_cut)
        seconds = matrices_seconds + attention_seconds + gradients_seconds
        plans.append(
            MeshPlan(
                mesh,
                exchange,
                sharding,
                activations,
                is_cut,
                memory,
                memory.total <= memory_bytes,
                matrices_seconds,
                attention_seconds,
                gradients_seconds,
                seconds,
                tokens / seconds,
            )
        )
    return min(plans, key=_rank_of)


def _attention(
    training: Training, mesh: Mesh, hardware: Hardware
) -> tuple[Exchange, str, Figures, AttentionWeight]:
    """Find the exchange and the sharding in which the attention of one layer is fastest.

    Returns the exchange, the sharding, the figures of the call, and the largest number of bytes that the call holds on
    a rank.
    """
    decoder = training.decoder
    call = PlannedCall(
        training.pattern,
        training.seq_len,
        mesh.sequence,
        decoder.num_heads,
        decoder.num_kv_heads,
        Sizes(training.batch, decoder.head_dim, training.itemsize),
    )
    exchange, sharding, _ = alternatives(call, hardware)[0]
    sharded_call = call.sharded_call(sharding, exchange.inner)
    figures = forecast(
        sharded_call, exchange, call.sizes, kernel=training.kernel, hardware=hardware
    )
    weights = [rank.weight for rank in figures.ranks if rank.weight is not None]
    return exchange, sharding, figures, max(weights, key=lambda weight: weight.peak)


def _gradient_seconds(training: Training, mesh: Mesh, hardware: Hardware, *, is_cut: bool) -> float:
    """The part of a step, in seconds, in which devices exchange gradients or parameters.

    Without FSDP2, devices sum gradients by a reduce-scatter and an all-gather. With FSDP2 (`is_cut` set),
    devices gather parameters twice and reduce-scatter gradients once.

    The devices of a host first exchange among themselves. So a host sends to other hosts only as many bytes as one
    device holds.
    """
    num_ranks = mesh.num_ranks
    inside = min(hardware.gpus_per_host or 1, num_ranks)
    rate_inside = hardware.network(0, inside - 1)[0]
    rate_between = hardware.network(0, num_ranks - 1)[0]
    within_hosts = (1 - 1 / inside) / rate_inside
    between_hosts = (1 / inside - 1 / num_ranks) / rate_between
    num_bytes = training.decoder.num_parameters * max(FLOAT, training.itemsize)
    times = 3 if is_cut else 2
    return times * num_bytes * (within_hosts + between_hosts)

"""Predicts the memory and the time of training a decoder on a mesh of ranks. Numbers only, no torch.

docs/planning.md has the sum: what the forward saves (`shape.py`), and what the backward holds besides (`working`).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, lcm
from typing import NamedTuple

from ..pattern import DilatedPattern
from ..plan.sizes import Sizes, Traits
from .call_cost import FLOPS_PER_PAIR, Figures, Time, Way, forecast, pairs
from .clock import Hardware
from .exchanges import UncutJob
from .shape import FLOAT, Shape

ACTIVATIONS = ("kept", "checkpointed", "offloaded")
LOSS_SLICE_LOGITS, LOSS_SLICE_ROWS = 2**20, 1024  # as in models/recompute.py, and tested to be
BYTES_PER_LOGIT = 12
# The search for what fits: the most ranks of a sequence, the most positions of a rank, and how exact a length is.
MOST_RANKS, LONGEST, SEARCHED_TO = 65_536, 2**34, 1 / 256


class Mesh(NamedTuple):
    """`data` groups of `sequence` ranks that share a sequence. Parameters, gradients and optimiser state are sharded
    over `shards` ranks (FSDP2)."""

    data: int = 1
    sequence: int = 1
    shards: int = 1

    @property
    def num_ranks(self) -> int:
        return self.data * self.sequence

    def __str__(self) -> str:
        return f"{self.data}x{self.sequence}" + (f"x{self.shards}" if self.shards > 1 else "")


@dataclass(frozen=True)
class ModelJob:
    """The training of a model. batch: sequences of each data-parallel group."""

    shape: Shape
    pattern: DilatedPattern
    seq_len: int
    batch: int
    mesh: Mesh
    sharding: str = "contiguous"
    num_threads: int = 1

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.batch, self.shape.head_dim, self.shape.itemsize, self.num_threads)

    @property
    def call(self) -> UncutJob:
        """One layer's attention."""
        heads = self.shape.num_heads, self.shape.num_kv_heads
        return UncutJob(self.pattern, self.seq_len, self.mesh.sequence, *heads, self.sizes)

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all ranks."""
        return self.batch * self.mesh.data * self.seq_len

    @property
    def rows(self) -> int:
        """Positions times batch, of the rank that has most."""
        return self.batch * -(-self.seq_len // self.mesh.sequence)


class ModelMemory(NamedTuple):
    """Bytes of one rank. host: what offloading keeps there."""

    parameters: int
    gradients: int
    optimiser: int
    activations: int
    working: int
    host: int = 0

    @property
    def total(self) -> int:
        return sum(self[:5])


def model_memory(job: ModelJob, activations: str, traits: Traits | None) -> ModelMemory:
    """The memory of the rank that holds most, at its peak.

    activations: one of ACTIVATIONS. Offloaded ones are checkpointed, and the host holds them: the device has those of
        the block whose backward runs.
    traits: those of the kernel. None leaves the attention out of `working`: the result is then a lower bound.
    """
    shape, mesh = job.shape, job.mesh
    cut = -(-shape.num_parameters // mesh.shards)
    parameters = cut * shape.param_itemsize
    moments = 2 * cut * max(FLOAT, shape.param_itemsize)
    optimiser = moments + (cut * FLOAT if shape.param_itemsize < FLOAT else 0)  # 16-bit parameters have a float32 copy
    block, checkpoint, ends = shape.saved()
    each = block if activations == "kept" else checkpoint
    held, host = (1, job.rows * shape.num_layers * each) if activations == "offloaded" else (shape.num_layers, 0)
    saved = job.rows * (held * each + ends)
    working = _working(job, traits, job.rows * (block - each))
    if mesh.shards > 1:  # the parameters of this block and the next, and one block's gradients
        working += 3 * shape.block_parameters * shape.itemsize
    elif shape.itemsize < shape.param_itemsize:
        working += shape.num_parameters * shape.itemsize  # weights cast once a step
    return ModelMemory(parameters, parameters, optimiser, saved, working, host)


def _working(job: ModelJob, traits: Traits | None, again: int) -> int:
    """The most that the backward of the loss and of the last block holds beside what the forward saved.

    again: the bytes of the activations that a checkpointed block computes again.
    """
    shape = job.shape
    row, wide = shape.embed_dim * shape.itemsize, shape.ffn_dim * shape.itemsize
    # The gradient of the residual stream is held. What the last norm saved is free. When the attention's backward runs,
    # what the block saved after its attention is free, too.
    stream = row - shape.last_norm
    # If shards > 1, `model_memory` counts the matrix with the gradients of a block.
    matrix = _gradient_of(shape, shape.embed_dim * shape.ffn_dim) if job.mesh.shards == 1 else 0
    # Two gradients are held: the hidden rows', and first the matrix's, later more hidden rows' (unless ffn is plain).
    beside = 0 if shape.blocks.ffn == "plain" else job.rows * wide
    hidden = job.rows * wide + max(matrix, beside)
    feed_forward = job.rows * stream + hidden + again
    in_attention = 0
    if traits is not None:
        attention = attention_of(job, traits).peak
        assert attention is not None
        given = {"query", "key", "value", "out", "lse"}
        beside = sum(item.num_bytes for item in attention.items if item.name not in given)
        in_attention = beside + job.rows * (stream - shape.behind_attention) + again
    return max(_working_of_loss(job), feed_forward, in_attention, 0)


def _working_of_loss(job: ModelJob) -> int:
    """The most that the loss holds: with a slice's logits, or later with the gradient of the head's matrix."""
    shape, row = job.shape, job.shape.embed_dim * job.shape.itemsize
    num_rows = min(job.rows, max(LOSS_SLICE_ROWS, LOSS_SLICE_LOGITS // shape.vocab_size))
    logits, head = num_rows * shape.vocab_size, _gradient_of(shape, shape.vocab_size * shape.embed_dim)
    summed = head if job.rows > num_rows else 0  # over the slices before
    at_logits = logits * BYTES_PER_LOGIT + (job.rows - num_rows) * row
    return summed + max(at_logits, logits * FLOAT + job.rows * row + head)


def _gradient_of(shape: Shape, num_entries: int) -> int:
    """Bytes of a matrix's own gradient. If the parameter is wider, a copy in the parameter's dtype is added."""
    return num_entries * (shape.itemsize + (shape.param_itemsize if shape.itemsize < shape.param_itemsize else 0))


@lru_cache(maxsize=1024)  # called again for each of ACTIVATIONS
def attention_of(job: ModelJob, traits: Traits | None = None, hardware: Hardware | None = None) -> Figures:
    """One layer's attention, on the ranks of one sequence."""
    hardware = None if hardware is None else of_a_group(job.mesh.sequence, job.mesh, hardware)
    return forecast(job.call.job(job.sharding), Way(), job.sizes, traits=traits, hardware=hardware)


def of_a_group(num_ranks: int, mesh: Mesh, hardware: Hardware) -> Hardware:
    """The hardware of consecutive ranks of a mesh. If such groups do not fill hosts, smaller hosts are assumed."""
    size = hardware.gpus_per_host
    if size is None or num_ranks == mesh.num_ranks or mesh.num_ranks <= size:
        return hardware
    return hardware._replace(gpus_per_host=gcd(size, num_ranks))


class StepTimes(NamedTuple):
    """Seconds of a step, by what takes them."""

    matrices: float  # the products with weights
    attention: Time  # of all layers, with their waits
    gradients: float  # `gradient_seconds`, which are assumed to overlap with nothing

    @property
    def all(self) -> Time:
        return Time(self.matrices + self.attention.seconds + self.gradients, self.attention.is_about)


def step_times(job: ModelJob, activations: str, hardware: Hardware) -> StepTimes:
    """One step of all ranks: forward, backward and the sum of gradients; the optimiser's own work is not counted."""
    shape = job.shape
    times = 3 if activations == "kept" else 4  # 1 for the forward, 2 for the backward, 1 if the forward runs again
    products = 2 * job.rows * (times * shape.num_layers * shape.block_matrices + 3 * shape.vocab_size * shape.embed_dim)
    attention = attention_of(job, hardware=hardware).time
    assert attention is not None
    layers = Time(shape.num_layers * attention.seconds, attention.is_about)
    return StepTimes(products / hardware.flops_per_second, layers, gradient_seconds(job, hardware))


def gradient_seconds(job: ModelJob, hardware: Hardware) -> float:
    """Ranks that share the states gather parameters twice and scatter gradients once (FSDP2). Then the ranks that hold
    the same part of the states sum its gradients (a scatter and a gather)."""
    mesh, num_bytes = job.mesh, job.shape.num_parameters * job.shape.param_itemsize
    among = of_a_group(mesh.shards, mesh, hardware)
    # The ranks with the same part are `shards` apart.
    apart = hardware._replace(gpus_per_host=max(1, (hardware.gpus_per_host or 1) // mesh.shards))
    over = seconds_a_byte(mesh.num_ranks // mesh.shards, apart)
    return num_bytes * (3 * seconds_a_byte(mesh.shards, among) + 2 / mesh.shards * over)


def seconds_a_byte(num_ranks: int, hardware: Hardware) -> float:
    """Seconds per byte of a scatter or gather: all bytes pass within hosts, a rank's share of them between hosts."""
    there = min(hardware.gpus_per_host or 1, num_ranks)
    inside, between = (hardware.network(0, last)[0] for last in (there - 1, num_ranks - 1))
    return (1 - 1 / there) / inside + (1 / there - 1 / num_ranks) / between


def flops_of_step(job: ModelJob) -> int:
    """The useful FLOPs of all ranks: 6 for each token and matrix entry, 14 D for each pair of a query and a key."""
    shape = job.shape
    matrices = shape.num_layers * shape.block_matrices + shape.vocab_size * shape.embed_dim
    num_pairs = pairs(job.pattern, job.seq_len, shape.num_heads) * job.batch * job.mesh.data
    attention = FLOPS_PER_PAIR * shape.head_dim * num_pairs
    return 6 * job.tokens * matrices + shape.num_layers * attention


def longest_sequence(job: ModelJob, activations: str, traits: Traits, num_bytes: int) -> int:
    """The longest sequence that fits, exact to a share of SEARCHED_TO. It is 0 if none fits."""

    def longest(suffices: Callable[[ModelJob], bool]) -> ModelJob | None:
        ranks = job.mesh.sequence
        least, most = 0, job.seq_len
        while most < LONGEST * ranks and suffices(replace(job, seq_len=most)):
            least, most = most, 2 * most
        while most - least > max(ranks, least * SEARCHED_TO):  # longer sequences hold more
            middle = max((least + most) // 2, least + ranks) // ranks * ranks
            least, most = (middle, most) if suffices(replace(job, seq_len=middle)) else (least, middle)
        return replace(job, seq_len=least) if least else None

    found = _fitting(longest, activations, traits, num_bytes)
    return 0 if found is None else found.seq_len


def smallest_mesh(job: ModelJob, activations: str, traits: Traits, num_bytes: int, host: int = 1) -> Mesh | None:
    """The mesh with the fewest sequence-parallel ranks, at most MOST_RANKS, on which the sequence fits, or None.

    It fills whole hosts of `host` ranks. If the job's own mesh fits and does so, this one has no more ranks.
    `data` and `shards` stay as they are; but a job that shards its states over all its ranks gets such a mesh, too.
    """
    mesh = job.mesh
    is_over_all = mesh.shards == mesh.num_ranks > 1
    # The ranks must fill whole hosts, and divide into groups of `shards` ranks unless the states are cut over all.
    unit = lcm(*(x // gcd(x, mesh.data) for x in (1 if is_over_all else mesh.shards, host)))

    def of(count: int) -> ModelJob:
        ranks = count * unit
        return replace(job, mesh=Mesh(mesh.data, ranks, mesh.data * ranks if is_over_all else mesh.shards))

    def smallest(suffices: Callable[[ModelJob], bool]) -> ModelJob | None:
        counts = range(1, min(MOST_RANKS, job.seq_len) // unit + 1)
        own = mesh.sequence // unit
        if own and suffices(of(own)):
            counts = range(1, own + 1)
        index = bisect_left(counts, True, key=lambda count: suffices(of(count)))  # more ranks hold less each
        return of(counts[index]) if index < len(counts) else None

    found = _fitting(smallest, activations, traits, num_bytes)
    return None if found is None else found.mesh


def _fitting(
    search: Callable[[Callable[[ModelJob], bool]], ModelJob | None], activations: str, traits: Traits, num_bytes: int
) -> ModelJob | None:
    """What a search finds. The first search is quick, since it leaves out attention. Most results fit with it too."""
    found = search(lambda job: model_memory(job, activations, None).total <= num_bytes)
    if found is None or model_memory(found, activations, traits).total <= num_bytes:
        return found
    return search(lambda job: model_memory(job, activations, traits).total <= num_bytes)

"""What a `LongNetLM` holds, computes and takes on a mesh of ranks, part by part. Numbers only, no torch.

Ranks are data parallel times sequence parallel: each group of `sequence` ranks shares a sequence, and `data` groups
have sequences of their own. With `shards` > 1 parameters, gradients and optimiser state are cut over so many ranks
(FSDP2).

Saved for backward, in numbers per position of a rank, where E is the width, F that of the feed-forward, H and G the
heads and D their size:

    a block            7 E + (E + 2 G D) + G D + 3 F, and H + 8 in float32 (lse; mean and deviation of four norms)
    checkpointed       2 E, and H in float32: its input, and what `save_attention` keeps of the attention
    the ends           2 E, and 2 + D in float32 (the last norm, the rotary table), and two int64 (tokens, labels)

What is taken for a moment (`working`) is the largest of the loss's backward, of the feed-forward's and of the
attention's, in the last block; and, checkpointed, that block once more:

    the loss           12 bytes per logit of a chunk; or 4, and the gradient of the head's matrix
    the feed-forward   per position gradients of F and of E; and that of one of its matrices
    the attention      what its buffers hold; its products with weights come before and after it

The gradient of a matrix is computed apart from the one that is kept (DDP's buckets, or that of an earlier backward) and
then added to it; the head's is summed over chunks first.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from ..pattern import DilatedPattern
from ..plan.counts import pairs
from ..plan.sizes import Sizes, Traits
from .call import Figures, Time, Way, forecast
from .clock import Hardware
from .compare import Call

ACTIVATIONS = ("kept", "checkpointed", "offloaded")
LOSS_CHUNK_LOGITS, LOSS_CHUNK_ROWS = 2**20, 1024  # as in models/longnet.py, and tested to be
BYTES_PER_LOGIT = 12
FLOAT = 4
# Of the search for what fits: ranks of a sequence, positions of a rank, and the share of a length that it is found to.
MOST_RANKS, LONGEST, SEARCHED_TO = 65_536, 2**34, 1 / 256


class Mesh(NamedTuple):
    """data x sequence ranks; parameters, gradients and optimiser state are cut over `shards` of them."""

    data: int = 1
    sequence: int = 1
    shards: int = 1

    @property
    def num_ranks(self) -> int:
        return self.data * self.sequence

    def __str__(self) -> str:
        return f"{self.data}x{self.sequence}" + (f"x{self.shards}" if self.shards > 1 else "")


class Shape(NamedTuple):
    """Of the model. Parameters and their gradients have param_itemsize bytes, activations itemsize."""

    num_layers: int
    embed_dim: int
    ffn_dim: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    itemsize: int = 4
    param_itemsize: int = 4

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def block_matrices(self) -> int:
        """Entries of the matrices of one block."""
        e, f = self.embed_dim, self.ffn_dim
        return (e + 2 * self.kv_dim) * e + e * e + 2 * e * f

    @property
    def block_parameters(self) -> int:
        e, f = self.embed_dim, self.ffn_dim
        biases = (e + 2 * self.kv_dim) + e + f + e
        norms = 2 * (3 * e + f)
        return self.block_matrices + biases + norms

    @property
    def num_parameters(self) -> int:
        ends = 2 * self.vocab_size * self.embed_dim + 2 * self.embed_dim
        return self.num_layers * self.block_parameters + ends


@dataclass(frozen=True)
class ModelJob:
    """A model, its pattern and what is trained with it. batch: sequences of each data-parallel group."""

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
    def call(self) -> Call:
        """One layer's attention."""
        heads = self.shape.num_heads, self.shape.num_kv_heads
        return Call(self.pattern, self.seq_len, self.mesh.sequence, *heads, self.sizes)

    @property
    def tokens(self) -> int:
        """Of one step, over all ranks."""
        return self.batch * self.mesh.data * self.seq_len

    @property
    def rows(self) -> int:
        """Positions times batch of the rank that has most."""
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
    """The rank that holds most, at the largest moment of a step.

    Args:
        activations: one of ACTIVATIONS. Offloaded ones are checkpointed, and lie in the host's memory but for the block
            at hand and the next.
        traits: of the kernel; None leaves the attention's moment out, so that the result is a lower bound.
    """
    shape, mesh = job.shape, job.mesh
    cut = -(-shape.num_parameters // mesh.shards)
    parameters, gradients = cut * shape.param_itemsize, cut * shape.param_itemsize
    moments = 2 * cut * max(FLOAT, shape.param_itemsize)
    optimiser = moments + (cut * FLOAT if shape.param_itemsize < FLOAT else 0)  # 16-bit ones have a wide copy
    block, ends, rest = _saved_of_block(shape), _saved_at_ends(shape), _saved_of_checkpoint(shape)
    is_again = activations != "kept"
    each = rest if is_again else block
    held = min(2, shape.num_layers) if activations == "offloaded" else shape.num_layers
    saved = job.rows * (held * each + ends)
    host = job.rows * (shape.num_layers - held) * each
    working = _working(job, traits, job.rows * (block - rest) if is_again else 0)
    if mesh.shards > 1:  # the block at hand and the next one, whole, and the gradients of one
        working += 3 * shape.block_parameters * shape.itemsize
    elif shape.itemsize < shape.param_itemsize:
        working += shape.num_parameters * shape.itemsize  # weights cast once a step
    return ModelMemory(parameters, gradients, optimiser, saved, working, host)


def fits(job: ModelJob, activations: str, traits: Traits | None, num_bytes: int) -> bool:
    return model_memory(job, activations, traits).total <= num_bytes


def _saved_of_block(shape: Shape) -> int:
    """Bytes for each position."""
    e, kv, f = shape.embed_dim, shape.kv_dim, shape.ffn_dim
    numbers = 7 * e + (e + 2 * kv) + kv + 3 * f
    return numbers * shape.itemsize + (shape.num_heads + 8) * FLOAT


def _saved_of_checkpoint(shape: Shape) -> int:
    return 2 * shape.embed_dim * shape.itemsize + shape.num_heads * FLOAT


def _saved_at_ends(shape: Shape) -> int:
    return 2 * shape.embed_dim * shape.itemsize + (2 + shape.head_dim) * FLOAT + 16


def _working(job: ModelJob, traits: Traits | None, again: int) -> int:
    """The most that the backward of the loss and of the last block takes beside what the forward saved.

    again: of what is computed once more of a block.
    """
    shape = job.shape
    row, wide = shape.embed_dim * shape.itemsize, shape.ffn_dim * shape.itemsize
    loss = _working_of_loss(job)
    # The gradient of the residual stream is there, and 2 E of the ends are gone; at the attention's turn 3 F and 3 E of
    # the block too.
    feed_forward = job.rows * (wide + row - 2 * row) + again
    if job.mesh.shards == 1:  # else it is among the gradients of the block at hand
        feed_forward += _gradient_of(shape, shape.embed_dim * shape.ffn_dim)
    if traits is None:
        return max(loss, feed_forward, 0)
    attention = attention_of(job, traits).peak
    assert attention is not None
    given = {"query", "key", "value", "out", "lse"}
    beside = sum(item.num_bytes for item in attention.items if item.name not in given)
    in_attention = beside + job.rows * (row - 5 * row - 3 * wide) + again
    return max(loss, feed_forward, in_attention, 0)


def _working_of_loss(job: ModelJob) -> int:
    """At a chunk's logits, or at the head's matrix after them, whichever holds more."""
    shape, row = job.shape, job.shape.embed_dim * job.shape.itemsize
    chunk = min(job.rows, max(LOSS_CHUNK_ROWS, LOSS_CHUNK_LOGITS // shape.vocab_size))
    logits, head = chunk * shape.vocab_size, _gradient_of(shape, shape.vocab_size * shape.embed_dim)
    summed = head if job.rows > chunk else 0  # of the chunks before
    at_logits = logits * BYTES_PER_LOGIT + (job.rows - chunk) * row
    return summed + max(at_logits, logits * FLOAT + job.rows * row + head)


def _gradient_of(shape: Shape, num_entries: int) -> int:
    """Bytes of a matrix's gradient on its way: one of 16 bits is made wide before it is added."""
    return num_entries * (shape.itemsize + (shape.param_itemsize if shape.itemsize < shape.param_itemsize else 0))


@lru_cache(maxsize=1024)  # the same whatever becomes of the model's activations
def attention_of(job: ModelJob, traits: Traits | None = None, hardware: Hardware | None = None) -> Figures:
    """One layer's attention, on the ranks of one sequence."""
    return forecast(job.call.job(job.sharding), Way(), job.sizes, traits=traits, hardware=hardware)


class StepParts(NamedTuple):
    """Seconds of a step, by what they go to.

    matrices: the products with weights. attention: of all layers, waits included. gradients: their sum over ranks,
    hidden by nothing.
    """

    matrices: float
    attention: Time
    gradients: float

    @property
    def all(self) -> Time:
        return Time(self.matrices + self.attention.seconds + self.gradients, self.attention.is_about)


def step_parts(job: ModelJob, activations: str, hardware: Hardware) -> StepParts:
    """One step of all ranks: forward, backward and the sum of gradients; the optimiser's own work is not counted."""
    shape = job.shape
    times = 3 if activations == "kept" else 4  # forward, and backward twice as much; forward again
    products = 2 * job.rows * (times * shape.num_layers * shape.block_matrices + 3 * shape.vocab_size * shape.embed_dim)
    attention = attention_of(job, hardware=hardware).time
    assert attention is not None
    ranks = job.mesh.num_ranks
    size = shape.num_parameters * shape.param_itemsize
    passes = 3 if job.mesh.shards > 1 else 2  # scatter and gather; sharded weights are gathered twice
    sum_seconds = passes * (ranks - 1) / ranks * size / hardware.bytes_per_second if ranks > 1 else 0.0
    layers = Time(shape.num_layers * attention.seconds, attention.is_about)
    return StepParts(products / hardware.flops_per_second, layers, sum_seconds)


def flops_of_step(job: ModelJob) -> int:
    """Useful ones, of all ranks: 6 for each entry of a matrix and position, 14 D for each pair."""
    shape = job.shape
    matrices = shape.num_layers * shape.block_matrices + shape.vocab_size * shape.embed_dim
    attention = 14 * shape.head_dim * pairs(job.pattern, job.seq_len, shape.num_heads) * job.batch * job.mesh.data
    return 6 * job.tokens * matrices + shape.num_layers * attention


def longest_sequence(job: ModelJob, activations: str, traits: Traits, num_bytes: int) -> int:
    """Positions at which memory suffices, at least the job's own if those do; 0 if not even one for each rank fits.
    Longer sequences hold more, so halving finds it, to SEARCHED_TO of the length."""

    def longest(suffices: Callable[[ModelJob], bool]) -> ModelJob | None:
        ranks = job.mesh.sequence
        least, most = 0, job.seq_len
        while most < LONGEST * ranks and suffices(replace(job, seq_len=most)):
            least, most = most, 2 * most
        while most - least > max(ranks, least * SEARCHED_TO):
            middle = max((least + most) // 2, least + ranks) // ranks * ranks
            least, most = (middle, most) if suffices(replace(job, seq_len=middle)) else (least, middle)
        return replace(job, seq_len=least) if least else None

    found = _fitting(longest, activations, traits, num_bytes)
    return 0 if found is None else found.seq_len


def smallest_mesh(job: ModelJob, activations: str, traits: Traits, num_bytes: int) -> Mesh | None:
    """The fewest sequence-parallel ranks on which the length fits, up to MOST_RANKS, and never more than the job's if
    those do; None if none do. Data parallel ranks and the cut of the states stay; a cut over all ranks goes on being
    one. More ranks hold less each, so halving finds it."""
    mesh = job.mesh
    is_over_all = mesh.shards == mesh.num_ranks > 1
    unit = 1 if is_over_all else mesh.shards // gcd(mesh.shards, mesh.data)  # the cut has to divide all ranks

    def of(count: int) -> ModelJob:
        ranks = count * unit
        return replace(job, mesh=Mesh(mesh.data, ranks, mesh.data * ranks if is_over_all else mesh.shards))

    def smallest(suffices: Callable[[ModelJob], bool]) -> ModelJob | None:
        counts = range(1, min(MOST_RANKS, job.seq_len) // unit + 1)
        own = mesh.sequence // unit
        if suffices(of(own)):
            counts = range(1, own + 1)
        index = bisect_left(counts, True, key=lambda count: suffices(of(count)))
        return of(counts[index]) if index < len(counts) else None

    found = _fitting(smallest, activations, traits, num_bytes)
    return None if found is None else found.mesh


def _fitting(
    search: Callable[[Callable[[ModelJob], bool]], ModelJob | None], activations: str, traits: Traits, num_bytes: int
) -> ModelJob | None:
    """What a search finds. It runs without the attention's moment first, which takes no time and is mostly the
    answer."""
    found = search(lambda job: fits(job, activations, None, num_bytes))
    if found is None or fits(found, activations, traits, num_bytes):
        return found
    return search(lambda job: fits(job, activations, traits, num_bytes))

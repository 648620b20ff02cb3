"""ContextParallel: the ranks that share a sequence, how the sequence is cut, and what ranks send outside attention."""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..pattern import is_integer
from ..plan.sharding import documents_of
from .arguments import check_arguments, cut_of, resolve_group
from .batches import fingerprint, shard_batch
from .call import borders_field, borders_of
from .named import NamedContext
from .processes import Processes, note_dropped
from .ranks import Ranks
from .reduce import mean_loss
from .reshard import ShardRows, UnshardRows, check_dim, forward_fields

DEFAULT_TIMEOUT = timedelta(minutes=10)


class ContextParallel(NamedContext):
    """Shares a sequence among the ranks of a group. Each rank holds some of the positions (its shard), with all heads.

    All ranks of the group construct the context together. Every rank runs every forward and every backward, even if its
    shard is empty. A backward runs only if the loss depends on the output of its forward. So a rank that has no use for
    the output adds 0 * out.sum() to its loss. (A forward, compiled or not, runs even if nothing uses its output.)

    `rank` is this process's number, below `world_size`. It may differ from the number in the group, because processes
    of one host get consecutive numbers. (A 2-D mesh keeps the order within each row: only whole rows move.)
    `name` is the context's name in errors, the same on every rank.

    Copies of a module (EMA, nn.TransformerEncoder) hold the same context. The thread that makes the first call owns the
    context until `close`. A call in any other thread raises ValueError on all ranks. In a forked process (a
    DataLoader's worker) only `positions` works, and calls that involve other ranks raise ValueError.

    torch.compile(fullgraph=True) takes `dilated_attention` and `MultiheadDilatedAttention`. Make the other calls that
    need all ranks (`shard`, `shard_batch`, `unshard`, `mean_loss`, LongNetLM's loss) outside compiled code.

    Args:
        group: a ProcessGroup, a DeviceMesh, or None. None means all ranks, or one process if torch.distributed is not
            initialised. On a 2-D mesh the ranks along the last axis trade heads for positions (all-to-all), and the
            ranks along the first axis send each other keys and values.
        sharding: "contiguous": shards follow each other in the order of ranks. "zigzag": the sequence is cut into 2p
            near-equal slices, and rank k of p gets slices k and 2p-1-k. "zigzag_documents": each packed document is cut
            as "zigzag" cuts a sequence. Every call then needs cu_seqlens. Functions that do not take cu_seqlens raise
            ValueError: DilatedCache.gather, ShardSequence(shard_inputs=True), and transformers' context_parallel.
        exchange: how keys and values travel. "ring": from rank to rank. "all_gather": to all ranks in one round.
            "all_to_all": each rank computes some heads at all positions. "auto" chooses by the bytes sent, the memory,
            the number of hops from rank to rank, and the number of kernel calls.
        timeout: how long a rank waits for another rank before it raises an error. (gloo notices a dead rank
            immediately. NCCL relies on its watchdog.)
        align: the borders of contiguous shards are multiples of this number.
        lengths: the lengths of contiguous shards, one for each rank; near-equal by default.

    Raises:
        ValueError: for unknown names, an `align` below 1, and lengths that do not fit the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        sharding: str = "contiguous",
        exchange: str = "auto",
        timeout: timedelta = DEFAULT_TIMEOUT,
        align: int = 1,
        lengths: Sequence[int] | None = None,
    ) -> None:
        mesh = group if isinstance(group, DeviceMesh) else None
        inner = 1
        self.group = resolve_group(group)
        members = dist.get_process_group_ranks(self.group) if self.group is not None else [0]
        if mesh is not None and mesh.ndim == 2:
            members = mesh.mesh.flatten().tolist()
            inner = mesh.shape[1]
        cut = failure = None
        try:
            check_arguments(mesh, exchange, timeout)
            cut = cut_of(len(members), sharding, align, lengths, inner)
            if len(members) == 1:
                self._take(Ranks(cut), exchange)
                return
        except Exception as error:
            if len(members) == 1:
                raise
            failure = str(error) or type(error).__name__
        ranks = Processes(members, timeout if failure is None else DEFAULT_TIMEOUT)
        ranks.connect(cut, exchange, failure)
        weakref.finalize(self, note_dropped, ranks.opened, ranks.name, ranks.process).atexit = False
        self._take(ranks, exchange)

    def _take(self, ranks: Ranks, exchange: str) -> None:
        """Set the attributes that this context takes from `ranks`."""
        self.ranks = ranks
        self.cut = ranks.cut
        self.sharding = ranks.cut.sharding
        self.exchange = exchange
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.name = ranks.name
        self._take_key(self.name)

    def __deepcopy__(self, memo: dict[int, object]) -> "ContextParallel":
        """Returns this context itself, because its connections cannot be copied."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ContextParallel holds connections of this process and cannot be pickled: save the module's state_dict, "
            "and make the context anew in every process."
        )

    def close(self) -> None:
        """Close the context's process groups, with their connections and threads. No call can follow.

        All ranks call `close` when they no longer need the context, even after an error, and before they make a new
        context.
        """
        self.ranks.close()

    def shard(self, x: Tensor, dim: int = 1, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """This rank's rows of a whole tensor that every rank holds.

        All ranks call `shard`, with tensors of equal shape. Under "zigzag_documents" they also pass cu_seqlens, the
        borders of packed documents. `shard` warns if the length and content of a tensor show that it is a shard
        already. (`shard_batch` also checks that all ranks hold the same sample.)

        Every rank gets the gradient of the whole tensor: all ranks' gradients of their rows, joined and divided by the
        number of ranks. Averaged over the ranks, what a backward computes is the gradient of the mean of the ranks'
        losses.

        Raises:
            ValueError: on every rank, if shapes or documents differ.
        """
        ranks = self.ranks
        content = 0
        ranks.check_all_here("shard")
        with ranks.refusing():
            check_dim("shard", x, dim)
            length = x.shape[dim]
            documents = documents_of(borders_of(cu_seqlens), length)
            lengths = ranks.lengths_of(length, documents)
            seems_cut = ranks.world_size > 1 and set(ranks.lengths_cut_last) == {length}
            if seems_cut and length and not x.is_meta:
                content = fingerprint(x.narrow(dim, 0, min(length, 64)))
        fields = forward_fields("shard", x, dim)
        fields |= {"length of the whole": length, "cu_seqlens": borders_field(documents)}
        if len(set(ranks.agree(content, fields))) > 1:
            ranks.warn_once(
                "shard",
                f"shard was given {length} positions, as many as each rank's shard of the "
                f"{sum(ranks.lengths_cut_last)} positions cut last, and the ranks' tensors differ: a shard is cut "
                "again. Pass it on as it is, or unshard it first",
            )
        shards = ranks.note_cut(lengths, documents)
        return x if len(shards) == 1 else ShardRows.apply(x, ranks, shards, dim)

    def shard_batch(
        self, batch: Mapping[str, Tensor] | None, *, source: int | None = None
    ) -> dict[str, Tensor]:
        """This rank's rows of one sample of a data loader. The sample is a dict of tensors: tokens, labels, masks, ...

            local = parallel.shard_batch(batch)              # every rank has the batch; they check that it is the same
            local = parallel.shard_batch(batch, source=0)    # rank 0 has the batch, and sends each rank only its rows

        Tensors (B, N, ...) and (N,) are cut along N. "cu_seqlens", the borders of packed documents, is not cut. Tensors
        may be on the CPU. The result also has "positions", (N_local,) int64: each row's position within its document.
        If the batch has "positions" already, they are cut like the other tensors.

        Args:
            batch: tensors by name, the same on all ranks. With `source`, other ranks may pass None.
            source: the rank that sends its batch. None: all ranks have the batch, and compare hashes of it.

        Raises:
            ValueError: on every rank, for tensors that cannot be cut, and if the ranks' samples differ. (By default a
                DistributedSampler gives each rank different samples.)
        """
        return shard_batch(self.ranks, batch, source)

    def unshard(self, x: Tensor, dim: int = 1, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """The whole tensor, on every rank, joined from the ranks' rows x. cu_seqlens: as for `shard`.

        Ranks may compute different losses from the whole tensor. So the backward adds up all ranks' gradients of the
        whole tensor, and gives each rank its rows of the sum. Every rank must run the backward. A rank that has no use
        for the whole tensor y adds 0 * y.sum() to its loss.
        """
        self.ranks.check_all_here("unshard")
        with self.ranks.refusing():
            check_dim("unshard", x, dim)
            borders = borders_of(cu_seqlens)
        fields = forward_fields("unshard", x, dim) | {"cu_seqlens": borders_field(borders)}
        lengths = self.ranks.handshake(x.shape[dim], fields)
        shards = self.ranks.shards(lengths, documents_of(borders, sum(lengths)))
        return x if len(shards) == 1 else UnshardRows.apply(x, self.ranks, shards, dim)

    def mean_loss(
        self,
        local_sum: Tensor,
        local_count: int | Tensor,
        *,
        over: "ContextParallel | None" = None,
        step_count: int | Tensor | None = None,
    ) -> Tensor:
        """The mean of a loss over all ranks, from each rank's sum and number of terms: a scalar, the same on all ranks.

            loss = parallel.mean_loss(F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())

        Ranks hold different numbers of terms, so the mean of the ranks' means would be wrong. DDP and FSDP2 average
        gradients over the ranks. Averaged over the ranks, what a backward computes is the gradient of the mean of the
        ranks' losses. Here every rank has the same loss. If you scale the result, scale it on every rank: a factor on
        one rank would scale only that rank's terms.

        Args:
            local_sum: the sum of the loss over this rank's positions, a scalar tensor. A rank that owns no position
                passes 0 times an output of the model.
            local_count: the number of terms in `local_sum`. If no rank has a term, the loss and its gradients are 0.
            over: a context that includes more ranks, usually those of all data-parallel replicas. The mean is then over
                the terms of all ranks of `over`, and gradients must be averaged over all of them. Without `over`, each
                replica has its own mean, and averaged gradients are the gradients of the mean of these means.
            step_count: this rank's number of terms in all micro-batches of one step. The losses of the micro-batches
                then add up to the mean over the step, and the gradients add up to the gradient of this mean. Do not
                divide the losses further.

        Raises:
            ValueError: on every rank, for an impossible sum or number of terms, and if `over` lacks a rank of this
                context or differs between ranks.
        """
        if over is None:
            return mean_loss(self.ranks, local_sum, local_count, step_count)
        self.ranks.check_all_here("mean_loss")
        failure = self._why_not_over(over)
        fields: dict[str, object] = {"call": "mean_loss over more ranks"}
        if not failure:
            fields["over"] = f"{over.name} of ranks {over.ranks.members}"
        # If one rank of this context refuses `over`, `agree` raises on all ranks of this context. But other ranks of
        # `over` may already wait for messages from this context. So each rank that did not refuse `over` breaks the
        # connections of `over` (`all_or_none`), and the waiting ranks fail.
        with nullcontext() if failure or over is self else over.ranks.all_or_none():
            self.ranks.agree(0, fields, failure)
        return mean_loss(over.ranks, local_sum, local_count, step_count)

    def _why_not_over(self, over: object) -> str | None:
        if not isinstance(over, ContextParallel):
            return f"over must be a ContextParallel of all ranks whose terms count, got {over!r}."
        if missing := set(self.ranks.members) - set(over.ranks.members):
            theirs = f"ranks {over.ranks.members}" if over.ranks.members else "one process alone"
            return (
                f"over is a context of {theirs}, and lacks the ranks {sorted(missing)} of this one: pass a context of "
                "all ranks whose gradients are averaged, as ContextParallel() is."
            )
        return None

    def positions(self, seq_len: int, cu_seqlens: Tensor | None = None) -> Tensor:
        """The position of each of this rank's rows within its document: (N_local,) int64 on the CPU. Sends nothing.

        Args:
            seq_len: the length of the whole sequence.
            cu_seqlens: the borders of packed documents in the whole sequence.

        Raises:
            ValueError: for a length or borders that no sequence can have.
        """
        if not is_integer(seq_len) or seq_len < 0:
            raise ValueError(f"seq_len must be an integer of at least 0, got {seq_len!r}.")
        borders = borders_of(cu_seqlens)
        return self.ranks.positions(self.ranks.lengths_of(seq_len, borders), borders)

    def abandon(self, reason: str) -> None:
        """Break the context's connections, so that the other ranks fail immediately and do not wait for this rank.

        Call it if this rank fails outside the package's calls. A call that fails breaks the connections by itself.
        """
        self.ranks.abandon(reason)

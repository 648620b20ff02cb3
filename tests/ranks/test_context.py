"""A ContextParallel between calls: its name, copies and end; and what one rank alone gets wrong.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import copy
import gc
import os
import pickle
import threading
import time
import warnings
from functools import partial
from unittest import mock

import distributed
import pytest
import torch
import torch.distributed as dist
from definition import PATIENCE, PATTERN, check_refused, mesh_of, whole
from distributed import run
from helpers import message_of, rows_of
from torch import nn

from ring_dilated_attention import (
    ContextParallel,
    DilatedCache,
    DilatedPattern,
    dilated_attention,
    simulate,
)
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.ranks.batches import fingerprint
from ring_dilated_attention.ranks.link import ExchangeError, GroupLink
from ring_dilated_attention.run import dilated_cache


def attend(context, x=None):
    x = torch.ones(1, 8, 4, 8) if x is None else x
    return dilated_attention(x, x, x, PATTERN, parallel=context)


def rank_does_not_use_its_lse(rank, world_size):
    found, contexts = [], [{"exchange": x} for x in ("ring", "all_gather", "all_to_all")]
    for options in (*contexts, {"group": mesh_of(1, 2)}):
        context = ContextParallel(**options, timeout=PATIENCE)
        leaves = [rows_of(context, x).requires_grad_() for x in whole(16, heads=(4, 4, 4))]
        out, lse = dilated_attention(*leaves, PATTERN, parallel=context, return_lse=True)
        loss = out.sum() if rank == 0 else out.sum() + lse.sum()
        found.append(torch.autograd.grad(loss, leaves))
        torch.testing.assert_close(found[-1], found[0], rtol=1e-11, atol=1e-11)


def test_a_loss_that_does_not_use_lse_on_one_rank():
    """Catches a gradient that one rank deals and another does not: gloo ends the process when messages do not fit."""
    run(2, rank_does_not_use_its_lse)


def rank_runs_out_of_memory(rank, world_size):
    x = torch.zeros(1, 4, 2, 8)
    for place, name, deed in (
        (torch, "cat", lambda context: context.unshard(x)),
        (dilated_cache, "packed", lambda context: DilatedCache.gather(context, x, x, PATTERN, 2)),
    ):
        context = ContextParallel(timeout=PATIENCE)

        def twice(deed=deed, context=context):
            for _ in range(2):  # where the first one's messages are through, the second says it
                deed(context)

        if rank == 0:
            message_of(twice, ExchangeError)
            continue
        with mock.patch.object(place, name, side_effect=MemoryError("no memory left")):
            assert "no memory left" in message_of(twice, MemoryError)
        assert context.ranks.all.failure


def test_a_rank_that_fails_alone_between_calls_of_attention():
    """Catches ranks that wait for one that ran out of memory between the handshake and its message."""
    run(2, rank_runs_out_of_memory, seconds=15)


def open_descriptors():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def rank_closes_contexts(rank, world_size):
    held = []
    for broken in (False, False, True, True):
        context = ContextParallel(timeout=PATIENCE)
        attend(context)
        if broken:
            dist.barrier()
            context.abandon("on purpose")
        context.close()
        message = message_of(partial(attend, context), ExchangeError)
        assert broken or "was closed" in message
        context.close()
        del context
        gc.collect()  # what was raised holds the frames that hold a context
        dist.barrier()
        held.append((open_descriptors(), len(dist.distributed_c10d._world.pg_map)))
    # fewer is no leak
    assert all(max(numbers) == numbers[0] for numbers in zip(*held, strict=True)), held
    assert threading.active_count() < 8


def test_a_context_that_is_closed():
    """Catches sockets and threads that every context, also a broken one, leaves behind."""
    run(2, rank_closes_contexts)


def rank_makes_contexts_again_and_again(rank, world_size):
    group = dist.new_group([0, 1])
    mesh = mesh_of(2, 2)
    names = []
    for turn in range(6 if rank < 2 else 0):
        if rank == turn % 2:
            time.sleep(0.05)  # whoever comes first must not find the other's old address
        contexts = [ContextParallel(group, timeout=PATIENCE) for _ in range(1 + turn % 3)]
        for context in contexts:  # closed one after the other: the numbers of groups come again
            attend(context)
            names += [link.group.group_name for link in context.ranks.opened]
            context.close()
    assert len(set(names)) == len(names)
    first, second = (ContextParallel(mesh, timeout=PATIENCE) for _ in range(2))
    first.close()
    for context in (second, ContextParallel(mesh, timeout=PATIENCE)):
        attend(context)
        context.close()


def test_contexts_of_some_ranks_that_are_closed_and_made_again():
    """Catches names that torch gives twice: under them its store still has the addresses of ports that are closed."""
    run(4, rank_makes_contexts_again_and_again)


def rank_opens_the_last_group_late(rank, world_size):
    opens = GroupLink.open

    def late(link):
        opens(link)
        if rank == 1 and link.name.startswith("data"):
            time.sleep(0.3)
            distributed.store.set("the last group is open", "yes")

    GroupLink.open = late
    ContextParallel(timeout=PATIENCE).close()
    assert distributed.store.check(["the last group is open"])


def test_no_rank_closes_a_context_before_all_have_made_it():
    """Catches a rank that closes at once: it breaks the connections that a slower rank still makes."""
    run(2, rank_opens_the_last_group_late)


def rank_alone_errs(rank, world_size):
    """Whatever one rank alone raises before a handshake reaches the others: between calls and in modules. (In calls of
    attention: `make fuzz`, kind `ranks`.)"""
    context = ContextParallel(timeout=PATIENCE)
    layer = MultiheadDilatedAttention(32, 4, PATTERN, rotary=True, parallel=context)
    x, tokens, labels = torch.randn(1, 8, 32), {"x": torch.zeros(1, 4, 3)}, torch.zeros(1, 8)
    heads, loss = torch.ones(1, 8, 4, 8), torch.zeros(())
    long = DilatedPattern((2**62, 8), (2**62, 1))
    attend_with = partial(dilated_attention, heads, heads, heads, parallel=context)
    cases = [
        (context.shard, x, None, "takes a dense tensor"),
        (partial(context.shard, x), 1, "1", "give the dim of the positions"),
        (context.unshard, x, [1], "takes a dense tensor"),
        (lambda y: context.mean_loss(y, 3), loss, x, "local_sum must be one number"),
        (partial(context.mean_loss, loss), 3, None, "local_count must be a number"),
        (context.shard_batch, tokens, {"x": x.to_sparse()}, "must be a dense tensor"),
        (context.shard_batch, tokens, {"x": x.to("meta")}, "must be a dense tensor"),
        (context.shard_batch, tokens, {"\udc80": x, "y": x[:, :3]}, "the same number of positions"),
        (partial(layer, x, x), x, x.bfloat16(), "dtype"),
        (lambda mask: layer(x, x, x, mask), None, labels > 0, "a padded batch cannot be sharded"),
        (lambda mask: layer(x, x, x, mask), None, [True], "key_padding_mask must be a tensor"),
        (lambda y: layer(x, x, x, positions=y), None, labels[0], "pass integers"),
        (attend_with, PATTERN, long, "ranks disagree on pattern"),
    ]
    check_refused(rank, world_size, cases)
    for odd in range(world_size):
        share = partial(context.shard_batch, source=odd)
        for wrong in ({1: x}, {"x": x.to_sparse()}):
            message_of(partial(share, wrong if rank == odd else None))
    assert context.unshard(context.shard(x)).equal(x)
    assert attend(context).shape == heads.shape


def test_what_one_rank_alone_gets_wrong_reaches_the_others():
    """Catches an error that is raised before the handshake, or that no check foresaw: the others would wait."""
    run(2, rank_alone_errs)


def rank_starts_anew(rank, world_size):
    old = ContextParallel(sharding="zigzag", timeout=PATIENCE)
    dist.destroy_process_group()
    store = dist.PrefixStore("again", distributed.store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
    new = ContextParallel(timeout=PATIENCE)
    assert old.key != new.key
    message = message_of(lambda: attend(old), ExchangeError)
    said = (
        "torch.distributed was shut down after this context was made. Make a new ContextParallel."
    )
    assert said in message
    assert attend(new).shape == (1, 8, 4, 8)


def test_contexts_of_two_lives_of_torch_distributed():
    """Catches a stale context that is taken for a new one, since torch numbers its groups from 1 again."""
    run(2, rank_starts_anew)


def test_a_copied_module_shares_the_context():
    """Catches modules that EMA and torch's containers cannot copy, and copies whose context nobody serves."""
    context = simulate.all_ranks(2)
    layer = MultiheadDilatedAttention(32, 4, PATTERN, parallel=context)
    assert copy.deepcopy(layer).parallel is context
    around = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    around.self_attn = layer
    stacked = nn.TransformerEncoder(around, 2, enable_nested_tensor=False)
    assert all(one.self_attn.parallel is context for one in stacked.layers)
    assert "state_dict" in message_of(lambda: pickle.dumps(layer), TypeError)


@pytest.mark.parametrize("number", [2, 16])
def test_processes_that_were_started_together_but_not_initialised(number, monkeypatch):
    """Catches ranks that each compute the whole sequence, in silence."""
    monkeypatch.setenv("WORLD_SIZE", str(number))
    said = rf"{number} processes were started.*init_process_group"
    with pytest.warns(UserWarning, match=said) as caught:
        ContextParallel()
    assert caught[0].filename == __file__


def rank_shards_batches(rank, world_size):
    """What comes of batches: test_group_without_cpu.py."""
    cp = ContextParallel(sharding="zigzag", timeout=PATIENCE)
    rows = cp.shard(torch.arange(11)[None])[0]
    tokens, is_last = torch.arange(22).view(2, 11), rank == world_size - 1
    given = {"tokens": tokens, "positions": torch.arange(11)}
    assert torch.equal(cp.shard_batch(given)["positions"], rows)
    other = {"tokens": tokens + is_last}
    message = message_of(lambda: cp.shard_batch(other))
    for words in ("ranks disagree on samples", "given different samples", "DistributedSampler"):
        assert words in message
    assert torch.equal(cp.shard_batch(other, source=0)["tokens"], tokens[:, rows])
    longer = {"tokens": torch.zeros(2, 11 + is_last)}
    assert "ranks disagree on shapes of the batch" in message_of(lambda: cp.shard_batch(longer))
    bad = {"tokens": torch.zeros(2, 11), "labels": torch.zeros(2, 10)}
    message = message_of(lambda: cp.shard_batch(given if is_last else bad))
    assert "the same number of positions, but tokens has 11, labels has 10" in message
    assert "a label of each recording, needs no cutting: leave it out" in message


def test_batches_of_a_data_loader():
    """Catches ranks of one sequence that were given different samples, or tensors of different lengths."""
    run(3, rank_shards_batches)


def test_batches_of_simulated_ranks():
    """They take the batch as it is."""
    batch = {"tokens": torch.arange(6)[None], "cu_seqlens": torch.tensor([0, 2, 6]).int()}
    for source in (None, 0):
        local = simulate.all_ranks(3).shard_batch(batch, source=source)
        assert torch.equal(local["tokens"], batch["tokens"])
        assert local["positions"].tolist() == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bool, torch.int64])
def test_fingerprints_tell_tensors_apart(dtype):
    """Catches a sum that does not see places: a shuffled sample has the same numbers."""
    x = torch.arange(97).remainder(2).to(dtype)
    others = [x, x.clone(), x.roll(1), x[:-1], torch.zeros_like(x)]
    assert len(set(map(fingerprint, others))) == 4


def rank_drops_contexts(rank, world_size):
    gc.collect()
    context = ContextParallel(timeout=PATIENCE)
    attend(context)
    before = open_descriptors()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = context.name
        del context
        gc.collect()
    [said] = [str(w.message) for w in caught if w.category is ResourceWarning]
    assert said.startswith(
        f"{name} was dropped without close(): its connections and threads are kept until all ranks"
    )
    assert open_descriptors() == before  # a finaliser gives nothing back: it may run anywhere
    dist.barrier()
    for _ in range(3):  # as many as were dropped before go with each new one
        context = ContextParallel(timeout=PATIENCE)
        attend(context)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del context
            gc.collect()
        dist.barrier()
    assert open_descriptors() <= before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ContextParallel(timeout=PATIENCE).close()
        gc.collect()
    dist.barrier()
    assert open_descriptors() < before


def test_contexts_that_are_dropped():
    """Catches connections that nobody can give back any more, in silence; and a finaliser that talks to other ranks."""
    run(2, rank_drops_contexts)


def rank_waits_long(rank, world_size):
    """Rank 1 is late; rank 0 looks after it all the while, and keeps nothing of its looks."""
    context = ContextParallel(timeout=PATIENCE)
    attend(context)
    posted, watched = [], GroupLink._watch

    def noted_watch(this, *args):
        posted.append(len(this._sentinels))
        if len(posted) == 9:
            distributed.store.set("rank 0 has looked", "")
        return watched(this, *args)

    if rank == 0:
        GroupLink._watch = noted_watch
    else:
        distributed.store.wait(["rank 0 has looked"])
    attend(context)
    if rank == 0:
        assert max(posted) == 1  # receives
    attend(context)
    context.close()
    dist.barrier()


def test_waiting_leaves_nothing_behind():
    """Catches a look at a connection that leaves a receive pending for each tenth of a second: 3.5 MB an hour."""
    run(2, rank_waits_long)


def rank_passes_the_whole(rank, world_size):
    context = ContextParallel(timeout=PATIENCE)
    full = torch.randn(1, 8, 4, 8)
    local = context.shard(full)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            attend(context, local)
        context.unshard(local + 0)
        # as long as the shards of the one before, and the same on every rank
        for length in (4, 4, 2, 0, 0):
            context.shard(full[:, :length])
        attend(context, full[:, :0])
        alone = simulate.all_ranks(2)
        alone.shard(alone.shard(full)[:, :4] + rank)

    def shard_again(other, x):
        other.shard(full)
        other.shard(x)

    taken = "every rank has 8 positions, as many as the sequence that was cut last: they count as one sequence of 16"
    again = "shard was given 4 positions, as many as each rank's shard of the 8 positions cut last, and the "
    again += "ranks' tensors"
    for deed, x, fragment in (
        (attend, full, taken),
        (ContextParallel.unshard, full, taken),
        (attend, full[:, : 1 + 5 * rank], "ranks have (1, 6) positions"),
        (shard_again, local * 2, again),
        (shard_again, local.to(torch.complex64), again),
    ):
        other = ContextParallel(timeout=PATIENCE)
        other.shard(full)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                deed(other, x)
        [said] = [str(w.message) for w in caught if w.category is UserWarning]
        assert fragment in said
    given = ContextParallel(lengths=(4, 4), timeout=PATIENCE)
    for _ in range(2):
        assert "lengths=(4, 4)" in message_of(lambda: shard_again(given, local * 2))


def test_a_whole_sequence_in_the_place_of_a_shard():
    """Catches a full tensor on every rank, which is taken for shards of a longer sequence without a word, and a shard
    that is cut again after an op; and warnings of batches that are half as long as the one before."""
    run(2, rank_passes_the_whole)

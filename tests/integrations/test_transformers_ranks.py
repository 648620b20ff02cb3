"""Models of transformers whose sequences ranks share, and under transformers' Trainer, against one process.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import LIKE_NCCL, RankFailedError, over_gloo, run
from helpers import message_of
from steps import environment
from tiny import DECODERS, ENCODERS, PATTERN, make, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from ring_dilated_attention import ContextParallel, save_attention
from ring_dilated_attention.integrations.transformers import (
    BoundedCache,
    SameSample,
    context_parallel,
)
from ring_dilated_attention.ranks.reduce import all_reduce

LENGTHS = {"plain": 19, "short": 3}
NEAR = {"rtol": 2e-6, "atol": 2e-7}  # transformers computes losses in float32


def batches(name):
    """By kind, what a model is given; the labels of some positions do not count."""
    found = {}
    for kind, length in LENGTHS.items():
        ids = tokens(2, length)
        found[kind] = {"input_ids": ids, "labels": ids.masked_fill(ids % 7 == 0, -100)}
    documents = [{"input_ids": tokens(1, n, seed=n)[0].tolist()} for n in (5, 11, 1, 7)]
    found["borders"] = dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True)(documents))
    if name not in ENCODERS:
        found["positions"] = dict(DataCollatorWithFlattening()(documents))
        mask = torch.ones(2, 19, dtype=torch.int64)
        mask[1, 12:] = 0
        found["right"] = {**found["plain"], "attention_mask": mask}
        found["right"]["labels"] = found["right"]["labels"].masked_fill(mask == 0, -100)
    return found


def loss_and_gradients(model, batch, parallel=None):
    out = model(**batch)
    out.loss.backward()
    gradients = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    model.zero_grad()
    if parallel is not None:
        gradients = [all_reduce(parallel.ranks, x) / parallel.world_size for x in gradients]
    return out.loss.detach(), gradients


def rank_trains(rank, world_size, names):
    for name in names:
        model = make(name)
        kinds = batches(name)
        expected = {kind: loss_and_gradients(model, batch) for kind, batch in kinds.items()}
        whole = model(kinds["plain"]["input_ids"]).logits.detach()
        state = set(model.state_dict())
        for sharding in ("contiguous", "zigzag"):
            parallel = ContextParallel(sharding=sharding)
            handle = context_parallel(model, parallel)
            for kind, batch in kinds.items():
                found = loss_and_gradients(model, batch, parallel)
                torch.testing.assert_close(
                    found, expected[kind], **NEAR, msg=lambda m, k=kind: f"{k} {m}"
                )
            out = model(kinds["plain"]["input_ids"])
            assert out.loss is None
            assert out.logits.shape[1] == len(parallel.positions(19)) < 19
            torch.testing.assert_close(out.logits, parallel.shard(whole), rtol=1e-10, atol=1e-10)
            assert set(model.state_dict()) == state
            handle.remove()
            parallel.close()
        torch.testing.assert_close(model(kinds["plain"]["input_ids"]).logits, whole, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_loss_and_gradients_of_one_rank(world_size):
    """Contiguous, zigzag, packed, padded on the right, and ranks that own one position. Catches labels that are lost at
    the borders of shards, a mean over one shard, and positions that begin at 0 on every rank, or anywhere where the
    model counts over rows of padding."""
    names = ["llama", *ENCODERS] if world_size == 3 else [*DECODERS, *ENCODERS]
    run(world_size, rank_trains, names, seconds=180)


def rank_checkpoints_and_compiles(rank, world_size):
    batch, parallel = batches("llama")["borders"], ContextParallel()
    expected = loss_and_gradients(make("llama"), batch)
    model, compiled = make("llama").train(), make("llama")
    for each in (model, compiled):
        context_parallel(each, parallel)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": save_attention})
    compiled.compile(backend="aot_eager")
    calls = parallel.ranks.calls
    torch.testing.assert_close(loss_and_gradients(model, batch, parallel), expected, **NEAR)
    assert parallel.ranks.calls - calls == 2  # one for each layer
    torch.testing.assert_close(loss_and_gradients(compiled, batch, parallel), expected, **NEAR)


def test_checkpointed_and_compiled():
    """Chunks travel once where attention is kept; compiled code has breaks only where ranks talk of the sample."""
    run(2, rank_checkpoints_and_compiles, seconds=180)


def rank_has_bad_input(rank, world_size):
    model, parallel, ids = make("llama"), ContextParallel(), tokens(1, 12)
    handle = context_parallel(model, parallel)
    mask, no_cache = torch.ones(1, 12, dtype=torch.int64), "context_parallel takes no cache"
    mask[0, :3] = 0
    of_padding = {"attention_mask": mask.flip(1), "labels": ids}
    no_items = {"labels": ids, "num_items_in_batch": 0}
    two = ids.expand(2, -1)
    given = [
        ({"cache": object()}, no_cache),
        ({"past_key_values": object()}, no_cache),  # as before 5.24
        ({"attention_mask": mask}, "attention_mask of shape (1, 12): sequences that are split"),
        (of_padding, "labels of padded positions must be"),
        ({"pixel_values": torch.zeros(1, 3)}, "pixel_values: it is not known how to cut this ten"),
        (no_items, "num_items_in_batch=0: the mean of a loss needs one"),
        ({"position_ids": list(range(12))}, "'list' object has no attribute"),
    ]
    calls = []
    for more, said in given:
        for ranks in ((0, 1), (1,)):  # also where the other rank sees nothing wrong
            more_here = more if rank in ranks else {}
            calls.append((partial(model, ids, **more_here), said))
    of_another = partial(model, tokens(1, 12, seed=rank), labels=ids)
    packed = partial(model, two, position_ids=(torch.arange(12) % 4).expand(2, -1))
    calls += [
        (of_another, "were given different samples"),
        (of_another, "under transformers' Trainer, SameSample"),
        (packed, "cu_seqlens must start at 0 and end at the length of the sequence, 12"),
        (partial(model, ids[:, :1]), "1 positions over 2 ranks are cut into shards of (1, 0)"),
        (partial(model.generate, ids, max_new_tokens=2), "then generate"),
        (partial(context_parallel, model, parallel), "remove() the first handle"),
    ]
    for call, said in calls:
        message = message_of(call)
        assert said in message, message
    assert model(ids, labels=ids).loss.isfinite()
    without_labels = {"input_ids": ids, "labels": ids * 0 - 100}
    for more in ({}, {"num_items_in_batch": 0}, {"num_items_in_batch": 5}):
        loss, gradients = loss_and_gradients(model, {**without_labels, **more}, parallel)
        assert not any(x.any() for x in (loss, *gradients))
    handle.remove()
    assert model.generate(ids, max_new_tokens=2).shape == (1, 14)
    copied = copy.deepcopy(model)
    context_parallel(copied, parallel)
    assert copied(ids).logits.shape[1] == 6
    assert model(ids).logits.shape[1] == 12
    del copied.model.layers[rank]
    copied.config.num_hidden_layers = 1
    assert "rank 0 has 1, rank 1 has 0. All ranks" in message_of(lambda: copied(ids, labels=ids))


def test_bad_input():
    """Every error on every rank, at once, and the model of use afterwards. Catches layers that are dropped apart, where
    queries of one layer would meet keys of another."""
    run(2, rank_has_bad_input, seconds=120)


def rank_shards_heads(rank, world_size):
    """torch's own tensor parallelism: each rank holds half of the heads, with the phases of the whole layer."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan["self_attn.o_proj"] = RowwiseParallel()
    ids, mask = tokens(2, 19), torch.ones(2, 19, dtype=torch.int64)
    mask[0, :5] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    greedy = {**batch, "max_new_tokens": 8, "do_sample": False}
    for kind in ({**PATTERN, "phase": "modulo"}, {**PATTERN, "heads": "split"}):
        model = make("llama", kind, torch.float32)
        names = set(model.state_dict())
        written = model.generate(**greedy)
        expected = loss_and_gradients(model, {**batch, "labels": ids})
        for layer in model.model.layers:
            parallelize_module(layer, mesh, plan)
        loss, gradients = loss_and_gradients(model, {**batch, "labels": ids})
        gradients = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in gradients]
        torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradients, expected[1], rtol=1e-4, atol=1e-6)
        assert set(model.state_dict()) == names
        for cache in (None, BoundedCache(model)):
            assert torch.equal(model.generate(**greedy, past_key_values=cache), written)


def test_tensor_parallel_heads():
    """Catches phases that go by the local head: another function, in silence. With and without a cache."""
    run(2, rank_shards_heads, seconds=120)


# --- Trainer


class SequenceTrainer(SameSample, Trainer):
    pass


def samples(count):
    return [
        {"input_ids": row, "labels": row}
        for row in (tokens(1, 19, seed=seed)[0] for seed in range(count))
    ]


QUIET = {"report_to": [], "disable_tqdm": True, "log_level": "error"}
ON_CPU = {"use_cpu": True, "ddp_backend": "gloo", **QUIET}


def trained(rank, world_size, folder, kind=Trainer, *, parallel=None, **more):
    """What Trainer logs, and the parameters afterwards. As many samples a step, whatever the number of processes."""
    environment(rank, world_size)
    model = make("llama", dtype=torch.float32)
    groups = world_size
    if parallel is not None:
        context_parallel(model, parallel)
        groups //= parallel.world_size
    arguments = {
        **ON_CPU,
        "per_device_train_batch_size": 2 // groups,
        "gradient_accumulation_steps": 2,
    }
    arguments |= {"per_device_eval_batch_size": 1, "eval_strategy": "epoch", "num_train_epochs": 2}
    arguments |= {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", **more}
    arguments = TrainingArguments(output_dir=folder, **arguments)
    trainer = kind(model=model, args=arguments, train_dataset=samples(8), eval_dataset=samples(4))
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    history = trainer.state.log_history
    logs = [entry[name] for entry in history for name in names if name in entry]
    return logs, {name: x.detach().tolist() for name, x in trainer.model.named_parameters()}


def same(found, expected):
    assert len(expected[0]) >= 10
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


def rank_of_trainer(rank, world_size, kind, folder):
    if kind == "sequence, without the CPU":
        group = dist.new_group(backend="gloo")
        # accelerate gathers tensors of its device, with NCCL from card to card
        gather = partial(dist.all_gather, group=group)
        with over_gloo(), mock.patch.object(dist, "all_gather", gather):
            return rank_of_trainer(rank, world_size, "sequence", folder)
    group = None
    if kind == "data x sequence":
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    if "sequence" in kind or kind == "unpaired":
        trainer = Trainer if kind == "unpaired" else SequenceTrainer
        parallel = ContextParallel(group, sharding="zigzag" if group is None else "contiguous")
        return trained(rank, world_size, folder, trainer, parallel=parallel)
    return trained(rank, world_size, folder, gradient_checkpointing=kind == "checkpointed")


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    return run(1, rank_of_trainer, "one", str(tmp_path_factory.mktemp("trainer")), seconds=120)[0]


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("checkpointed", 1),
        ("data", 2),
        ("sequence", 2),
        ("sequence, without the CPU", 2),
        ("data x sequence", 4),
    ],
)
def test_trainer(kind, world_size, of_one_process, tmp_path):
    """Losses, norms of gradients, held-out losses and parameters of four steps: those of one process. Catches a loss
    that is normalised over one shard, and labels that are counted once for each rank of a sequence."""
    backend = LIKE_NCCL if "without the CPU" in kind else "gloo"
    for found in run(
        world_size, rank_of_trainer, kind, str(tmp_path), seconds=180, backend=backend
    ):
        same(found, of_one_process)


def test_trainer_that_deals_different_samples_to_the_ranks_of_a_sequence(tmp_path):
    """accelerate's default. Caught before the first step."""
    with pytest.raises(RankFailedError, match="were given different samples") as caught:
        run(2, rank_of_trainer, "unpaired", str(tmp_path), seconds=120)
    assert "under transformers' Trainer, SameSample" in str(caught.value)


def rank_asks_too_much_of_trainer(rank, world_size, folder):
    environment(rank, world_size)
    model = make("llama", dtype=torch.float32)
    arguments = TrainingArguments(output_dir=folder, **ON_CPU)
    trainer = SequenceTrainer(
        model=model, args=arguments, train_dataset=samples(8), eval_dataset=samples(9)
    )
    loader, held_out = trainer.get_train_dataloader, trainer.get_eval_dataloader
    assert "call context_parallel(model, ...)" in message_of(loader)
    context_parallel(model, ContextParallel())
    of_whole_labels = lambda outputs, labels, num_items_in_batch: outputs.logits.sum()  # noqa: E731
    for where, name, value, said in (
        (arguments, "label_smoothing_factor", 0.1, "label_smoothing_factor=0.1: Trainer would com"),
        (trainer, "compute_loss_func", of_whole_labels, "compute_loss_func would be given whole"),
    ):
        with mock.patch.object(where, name, value):
            assert said in message_of(loader)
    assert "9 samples are no multiple of the 8 samples of a step" in message_of(held_out)
    arguments.per_device_eval_batch_size = 3
    assert len(held_out()) == 3
    assert "each rank has its shard of them" in message_of(lambda: trainer.predict(samples(3)))
    assert trainer.evaluate()["eval_loss"] > 0
    dist.barrier()


def test_what_trainer_cannot_do(tmp_path):
    run(2, rank_asks_too_much_of_trainer, str(tmp_path), seconds=120)

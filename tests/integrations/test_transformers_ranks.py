"""Models of transformers whose sequences ranks share, and under transformers' Trainer, against one process.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import copy
import os
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import LIKE_NCCL, RankFailedError, over_gloo, run
from helpers import message_of
from tiny import DECODERS, PATTERN, SIZES, make, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    DataCollatorWithFlattening,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
)

from ring_dilated_attention import ContextParallel, DilatedPattern, save_attention
from ring_dilated_attention.integrations.transformers import (
    BoundedCache,
    SameSample,
    context_parallel,
    register,
)
from ring_dilated_attention.ranks.reduce import all_reduce

LENGTHS = {"plain": 19, "short": 3}


def batches(name):
    """By kind, what a model is given; the labels of some positions do not count."""
    found = {}
    for kind, length in LENGTHS.items():
        ids = tokens(2, length)
        found[kind] = {"input_ids": ids, "labels": ids.masked_fill(ids % 7 == 0, -100)}
    documents = [{"input_ids": tokens(1, n, seed=n)[0].tolist()} for n in (5, 11, 1, 7)]
    found["borders"] = dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True)(documents))
    if name != "bert":
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
                # transformers computes losses in float32
                torch.testing.assert_close(
                    found, expected[kind], rtol=2e-6, atol=2e-7, msg=lambda m, k=kind: f"{k} {m}"
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
    the borders of shards, a mean over one shard, and positions that begin at 0 on every rank."""
    names = ["llama", "bert"] if world_size == 3 else [*DECODERS, "bert"]
    run(world_size, rank_trains, names, seconds=180)


def rank_trains_without_cpu(rank, world_size):
    with over_gloo():
        rank_trains(rank, world_size, ["llama"])


def test_a_group_without_a_backend_for_the_cpu():
    """The same after `init_process_group("nccl")`, for which "cuda:gloo" stands in."""
    run(2, rank_trains_without_cpu, seconds=180, backend=LIKE_NCCL)


def rewarded(model, unshard):
    """A reward: the last position of the whole sequence."""
    hidden = unshard(model(input_ids=tokens(2, 19)).last_hidden_state)
    return (hidden[:, -1].mean(-1) - 1).square().mean()


def preferred(model, unshard):
    """DPO: the log-likelihoods of two answers of different lengths, beside those of a frozen reference."""
    scores = []
    for ids in (tokens(1, 19), tokens(1, 14, seed=2)):
        log_probabilities = unshard(model(input_ids=ids).logits).log_softmax(-1)[:, :-1]
        scores.append(log_probabilities.gather(-1, ids[:, 1:, None]).sum())
    return -torch.nn.functional.logsigmoid(0.1 * (scores[0] - scores[1] - 3.0))


def rank_has_a_loss_of_the_whole(rank, world_size):
    parallel = ContextParallel(sharding="zigzag")
    for loss_of in (rewarded, preferred):
        expected, found = make("llama"), make("llama")
        if loss_of is rewarded:
            expected, found = expected.model, found.model
        right = loss_of(expected, lambda x: x)
        right.backward()
        context_parallel(found, parallel)
        replica = torch.nn.parallel.DistributedDataParallel(found)
        loss = loss_of(replica, parallel.unshard)
        loss.backward()
        torch.testing.assert_close(loss, right, rtol=1e-9, atol=0)
        for (name, x), y in zip(expected.named_parameters(), found.parameters(), strict=True):
            assert (y.grad - x.grad).norm() < 1e-8 * x.grad.norm(), name


def test_losses_of_the_whole_sequence():
    """Rewards and preferences under DDP. Catches gradients of the body that are 1 / ranks of those of one process."""
    run(2, rank_has_a_loss_of_the_whole, seconds=120)


def rank_drops_another_layer(rank, world_size):
    model = make("llama")
    context_parallel(model, ContextParallel())
    ids = tokens(1, 19)
    model(ids, labels=ids)
    del model.model.layers[rank]
    model.config.num_hidden_layers = 1
    assert "rank 0 has 1, rank 1 has 0. All ranks" in message_of(lambda: model(ids, labels=ids))


def test_layers_that_are_dropped_apart():
    """Catches queries of one layer that meet keys of another."""
    run(2, rank_drops_another_layer, seconds=120)


def rank_has_unequal_replicas(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    samples = [tokens(1, 19), tokens(1, 7)]
    expected, found = make("llama"), make("llama")
    total = sum(ids.shape[1] - 1 for ids in samples)
    sum(expected(ids, labels=ids, num_items_in_batch=total).loss for ids in samples).backward()
    context_parallel(found, ContextParallel(mesh["cp"]))
    ids = samples[mesh.get_local_rank("dp")]
    replica = torch.nn.parallel.DistributedDataParallel(found)
    replica(ids, labels=ids, num_items_in_batch=total / 2).loss.backward()
    for (name, x), y in zip(expected.named_parameters(), found.parameters(), strict=True):
        # transformers computes losses in float32
        assert (y.grad - x.grad).norm() < 1e-6 * x.grad.norm(), name


def test_unequal_replicas():
    """As the page on integrations says. Catches a mean of the replicas' means."""
    run(4, rank_has_unequal_replicas, seconds=120)


def rank_counts_positions(rank, world_size):
    register()
    torch.manual_seed(0)
    no_dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    config = RobertaConfig(
        **SIZES, **no_dropout, max_position_embeddings=40, dilated_attention=PATTERN
    )
    model = RobertaForMaskedLM(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15) if parameter.dim() > 1 else None
    plain = {"input_ids": tokens(2, 19), "labels": tokens(2, 19, seed=2)}
    assert (plain["input_ids"] == config.pad_token_id).any()  # a token that RoBERTa counts over
    for batch in (plain, {**plain, "position_ids": torch.arange(2, 21)[None]}):
        expected = loss_and_gradients(model, batch)
        parallel = ContextParallel(sharding="zigzag")
        handle = context_parallel(model, parallel)
        torch.testing.assert_close(
            loss_and_gradients(model, batch, parallel), expected, rtol=2e-6, atol=2e-7
        )
        handle.remove()
        parallel.close()


def test_positions_that_do_not_begin_at_0():
    """RoBERTa counts from the row behind that of padding. Catches other positions, and with them another model."""
    run(2, rank_counts_positions, seconds=120)


def rank_shards_parameters(rank, world_size):
    batch = batches("llama")["right"]
    model = make("llama")
    loss, gradients = loss_and_gradients(model, batch)
    for first in (True, False):
        model, parallel = make("llama"), ContextParallel(sharding="zigzag")
        if first:
            context_parallel(model, parallel)
        for module in (*model.model.layers, model):
            fully_shard(module)
        if not first:
            context_parallel(model, parallel)
        out = model(**batch)
        out.loss.backward()
        torch.testing.assert_close(out.loss.detach(), loss, rtol=2e-6, atol=2e-7)
        found = [x.grad.full_tensor() for x in model.parameters()]
        torch.testing.assert_close(found, gradients, rtol=2e-6, atol=2e-7)
        parallel.close()


def test_parameters_sharded_over_the_same_ranks():
    """FSDP2's hooks and ours on one model, in either order."""
    run(2, rank_shards_parameters, seconds=120)


def rank_checkpoints_and_compiles(rank, world_size):
    batch = batches("llama")["borders"]
    expected = loss_and_gradients(make("llama"), batch)
    parallel = ContextParallel()
    model = make("llama").train()
    context_parallel(model, parallel)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": save_attention})
    calls = parallel.ranks.calls
    torch.testing.assert_close(
        loss_and_gradients(model, batch, parallel), expected, rtol=2e-6, atol=2e-7
    )
    assert parallel.ranks.calls - calls == 2  # one for each layer
    compiled = make("llama")
    context_parallel(compiled, parallel)
    compiled.compile(backend="aot_eager")
    torch.testing.assert_close(
        loss_and_gradients(compiled, batch, parallel), expected, rtol=2e-6, atol=2e-7
    )


def test_checkpointed_and_compiled():
    """Chunks travel once where attention is kept; compiled code has breaks only where ranks talk of the sample."""
    run(2, rank_checkpoints_and_compiles, seconds=180)


def rank_has_bad_input(rank, world_size):
    model = make("llama")
    parallel = ContextParallel()
    handle = context_parallel(model, parallel)
    ids = tokens(1, 12)
    message = message_of(lambda: model(tokens(1, 12, seed=rank), labels=ids))
    assert "were given different samples" in message
    assert "under transformers' Trainer, SameSample" in message
    mask = torch.ones(1, 12, dtype=torch.int64)
    mask[0, :3] = 0
    given = {
        "a cache": ({"cache": object()}, "context_parallel takes no cache"),
        "a cache, as before 5.24": (
            {"past_key_values": object()},
            "context_parallel takes no cache",
        ),
        "left padding": (
            {"attention_mask": mask},
            "attention_mask of shape (1, 12): ranks share whole sequences",
        ),
        "labels of padding": (
            {"attention_mask": mask.flip(1), "labels": ids},
            "labels of padded positions must be",
        ),
        "another tensor": (
            {"pixel_values": torch.zeros(1, 3)},
            "pixel_values: it is not known how to cut this tensor",
        ),
        "no items": (
            {"labels": ids, "num_items_in_batch": 0},
            "num_items_in_batch=0: the mean of a loss needs one",
        ),
        "a list": ({"position_ids": list(range(12))}, "'list' object has no attribute"),
    }
    for kind, (more, said) in given.items():
        for ranks in ((0, 1), (1,)):  # also where the other rank sees nothing wrong
            more_here = more if rank in ranks else {}
            message = message_of(
                lambda more_here=more_here: model(**{"input_ids": ids, **more_here})
            )
            assert said in message, (kind, message)
    two = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]).expand(2, -1)
    message = message_of(lambda: model(ids.expand(2, -1), position_ids=two))
    assert "cu_seqlens must start at 0 and end at the length of the sequence, 12" in message
    assert "1 positions over 2 ranks are (1, 0)" in message_of(lambda: model(ids[:, :1]))
    assert "then generate" in message_of(lambda: model.generate(ids, max_new_tokens=2))
    assert "remove() the first handle" in message_of(lambda: context_parallel(model, parallel))
    assert model(ids, labels=ids).loss.isfinite()
    for more in ({}, {"num_items_in_batch": 0}, {"num_items_in_batch": 5}):
        loss, gradients = loss_and_gradients(
            model, {"input_ids": ids, "labels": ids * 0 - 100, **more}, parallel
        )
        assert not loss
        assert not any(x.any() for x in gradients)
    handle.remove()
    assert model.generate(ids, max_new_tokens=2).shape == (1, 14)
    copied = copy.deepcopy(model)
    context_parallel(copied, parallel)
    assert copied(ids).logits.shape[1] == 6
    assert model(ids).logits.shape[1] == 12


def test_bad_input():
    """Every error on every rank, at once, and the model of use afterwards."""
    run(2, rank_has_bad_input, seconds=120)


def rank_shards_heads(rank, world_size):
    """torch's own tensor parallelism: each rank holds half of the heads, with the phases of the whole layer."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    for kind in ({**PATTERN, "phase": "modulo"}, {**PATTERN, "heads": "split"}):
        model = make("llama", kind, torch.float32)
        names, ids = set(model.state_dict()), tokens(2, 19)
        mask = torch.ones(2, 19, dtype=torch.int64)
        mask[0, :5] = 0
        expected = model(ids, attention_mask=mask, labels=ids)
        expected.loss.backward()
        gradients = {name: x.grad.clone() for name, x in model.named_parameters()}
        model.zero_grad()
        with torch.no_grad():
            written = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {
            "self_attn.o_proj": RowwiseParallel()
        }
        for layer in model.model.layers:
            parallelize_module(layer, mesh, plan)
        out = model(ids, attention_mask=mask, labels=ids)
        torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=1e-6)
        out.loss.backward()
        for name, x in model.named_parameters():
            grad = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
            torch.testing.assert_close(grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
        assert set(model.state_dict()) == names
        with torch.no_grad():
            for cache in (None, BoundedCache(model)):
                more = {
                    "attention_mask": mask,
                    "past_key_values": cache,
                    "max_new_tokens": 8,
                    "do_sample": False,
                }
                assert torch.equal(model.generate(ids, **more), written)


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


def trained(rank, world_size, folder, kind=Trainer, *, samples_per_step=4, parallel=None, **more):
    """What Trainer logs, and the parameters afterwards. As many samples a step, whatever the number of processes."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    # never opened: torch.distributed is initialised
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    model = make("llama", dtype=torch.float32)
    groups = world_size
    if parallel is not None:
        context_parallel(model, parallel)
        groups //= parallel.world_size
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=samples_per_step // 2 // groups,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=1,
        eval_strategy="epoch",
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        **more,
    )
    trainer = kind(model=model, args=arguments, train_dataset=samples(8), eval_dataset=samples(4))
    trainer.train()
    logs = [
        entry[name]
        for entry in trainer.state.log_history
        for name in ("loss", "grad_norm", "eval_loss")
        if name in entry
    ]
    return logs, {name: x.detach().tolist() for name, x in trainer.model.named_parameters()}


def same(found, expected):
    assert len(expected[0]) >= 10
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


def rank_of_trainer(rank, world_size, kind, folder):
    parallel, trainer = None, Trainer
    if kind == "sequence, without the CPU":
        group = dist.new_group(backend="gloo")
        # accelerate gathers tensors of its device, with NCCL from card to card
        gather = partial(dist.all_gather, group=group)
        with over_gloo(), mock.patch.object(dist, "all_gather", gather):
            return rank_of_trainer(rank, world_size, "sequence", folder)
    if kind == "sequence":
        parallel, trainer = ContextParallel(sharding="zigzag"), SequenceTrainer
    elif kind == "data x sequence":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        parallel, trainer = ContextParallel(mesh["cp"]), SequenceTrainer
    elif kind == "checkpointed":
        return trained(rank, world_size, folder, gradient_checkpointing=True)
    elif kind == "unpaired":
        parallel = ContextParallel()
    return trained(rank, world_size, folder, trainer, parallel=parallel)


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
    parallel = ContextParallel()
    model = make("llama", dtype=torch.float32)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True
    )
    trainer = SequenceTrainer(
        model=model, args=arguments, train_dataset=samples(8), eval_dataset=samples(9)
    )
    assert "call context_parallel(model, ...)" in message_of(trainer.get_train_dataloader)
    context_parallel(model, parallel)
    arguments.label_smoothing_factor = 0.1
    assert "label_smoothing_factor=0.1: Trainer would compute" in message_of(
        trainer.get_train_dataloader
    )
    arguments.label_smoothing_factor = 0.0
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs.logits.sum()
    assert "compute_loss_func would be given whole labels" in message_of(
        trainer.get_train_dataloader
    )
    trainer.compute_loss_func = None
    assert "9 samples are no multiple of the 8 of a step" in message_of(trainer.get_eval_dataloader)
    arguments.per_device_eval_batch_size = 3
    assert len(trainer.get_eval_dataloader()) == 3
    assert "each rank has its shard of them" in message_of(lambda: trainer.predict(samples(3)))
    assert trainer.evaluate()["eval_loss"] > 0
    dist.barrier()


def test_what_trainer_cannot_do(tmp_path):
    run(2, rank_asks_too_much_of_trainer, str(tmp_path), seconds=120)


def test_a_pattern_object_in_the_config():
    model = make("llama", DilatedPattern((4, 9), (1, 3)))
    rules = {"window": None, "phase": "modulo", "heads": "all"}
    assert model.config.dilated_attention == {**PATTERN, **rules}

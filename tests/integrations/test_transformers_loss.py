"""The loss in slices of rows, against the model's own: for each kind of head, on one process and on two ranks."""

from unittest import mock

import torch
import transformers
from distributed import run
from helpers import message_of
from test_transformers_ranks import NEAR, batches, loss_and_gradients
from tiny import PATTERN, SIZES, make, tokens
from torch.distributed.fsdp import fully_shard
from transformers import (
    BertConfig,
    BertForPreTraining,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.measure import allocated
from ring_dilated_attention import ContextParallel
from ring_dilated_attention.integrations.transformers import context_parallel, register
from ring_dilated_attention.models import recompute

ROWS = 7  # in a slice
# What is done to hidden states and logits beside a product with the head.
HEADS = {
    "tied, scaled embeddings": ("Gemma", {"head_dim": 8, "num_key_value_heads": 1}),
    # as Gemma 2, whose attention is refused
    "capped": ("NanoChat", {"final_logit_softcapping": 0.5}),
    "scaled": ("Cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "divided": ("Granite", {"logits_scaling": 3.0}),
    "bias": ("Phi", {}),
    "biased attention": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "experts": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "decoder inside": (
        "OPT",
        {"ffn_dim": 40, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    ),
    "unnamed loss": ("GPT2", {"attn_pdrop": 0.0}),
}


def make_head(kind):
    register()
    name, more = HEADS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES, **more, dilated_attention=PATTERN)
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    # torch has no grouped products in float64
    dtype = torch.float32 if kind == "experts" else torch.float64
    model = getattr(transformers, f"{name}{suffix}")(config).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model


def sample(length=19):
    ids = tokens(2, length)
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 7 == 0, -100)}


def in_small_slices():
    return mock.patch.multiple(recompute, LOSS_SLICE_LOGITS=1, LOSS_SLICE_ROWS=ROWS)


@in_small_slices()
def rank_trains_heads(rank, world_size):
    parallel = ContextParallel(sharding="zigzag")
    for kind in HEADS:
        model, batch = make_head(kind), sample()
        # as replicas of unequal lengths give it: all their labels, divided by the number of replicas
        batches = (batch, {**batch, "num_items_in_batch": 50.5})
        expected = [loss_and_gradients(model, each) for each in batches]
        handle = context_parallel(model, parallel)
        found = [loss_and_gradients(model, each, parallel) for each in batches]
        error = 1e-5 if kind == "experts" else 1e-6  # transformers computes losses in float32
        torch.testing.assert_close(
            found, expected, rtol=error, atol=error, msg=lambda m, k=kind: f"{k} {m}"
        )
        assert model(**batch).logits is None
        assert model(batch["input_ids"]).logits.shape[1] < 19
        handle.remove()


def test_heads_on_two_ranks():
    """Catches a cap, scale or bias that slices lose, and labels lost where slices meet."""
    run(2, rank_trains_heads, seconds=180)


@in_small_slices()
def rank_shards_parameters(rank, world_size):
    batch, parallel = batches("llama")["right"], ContextParallel(sharding="zigzag")
    loss, gradients = loss_and_gradients(make("llama"), batch)
    layers = ("model.layers.0", "model.layers.1", "")
    for is_first, paths, options in (
        (True, layers, {}),
        (False, layers, {}),
        (True, ("lm_head",), {"reshard_after_forward": True}),
        (True, ("lm_head", "model", ""), {"reshard_after_forward": True}),
    ):
        model = make("llama")
        if is_first:
            context_parallel(model, parallel)
        for path in paths:
            fully_shard(model.get_submodule(path), **options)
        if not is_first:
            context_parallel(model, parallel)
        out = model(**batch)
        out.loss.backward()
        torch.testing.assert_close(out.loss.detach(), loss, **NEAR)
        if "" in paths:
            found = [x.grad.full_tensor() for x in model.parameters()]
            torch.testing.assert_close(found, gradients, **NEAR)


def test_sharded_parameters():
    """FSDP2's hooks and ours on one model, in either order. A head that is sharded alone is gathered for each slice, in
    backward too."""
    run(2, rank_shards_parameters, seconds=180)


@in_small_slices()
def test_autocast_and_dropout():
    """Backward draws again what forward drew."""
    model = make("llama", dtype=torch.float32).train()
    model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.5), model.lm_head)
    context_parallel(model, ContextParallel())
    parameter, step = model.lm_head[1].weight, 1e-2

    def loss():
        torch.manual_seed(3)
        return model(**sample()).loss

    [gradient] = torch.autograd.grad(loss(), [parameter])
    direction = gradient / gradient.norm()
    losses = []
    with torch.no_grad():
        for move in (step, -2 * step):
            parameter += move * direction
            losses.append(loss())
        parameter += step * direction
    difference = (losses[0] - losses[1]) / (2 * step)
    torch.testing.assert_close(difference, gradient.norm(), rtol=1e-2, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        loss().backward()
    assert parameter.grad.dtype == torch.float32


def test_all_logits_never_exist():
    """Forward and backward stay below one (N, V) tensor."""
    register()
    config = LlamaConfig(
        **{**SIZES, "vocab_size": 4096, "num_hidden_layers": 1}, dilated_attention=PATTERN
    )
    model, ids = LlamaForCausalLM(config), torch.zeros(1, 8192, dtype=torch.int64)
    context_parallel(model, ContextParallel())
    all_logits = ids.numel() * 4096 * 4
    assert allocated(lambda: model(ids, labels=ids).loss.backward()).peak_bytes < 0.7 * all_logits
    assert allocated(lambda: model(ids)).peak_bytes > all_logits


def test_refused():
    """What adds to a loss, or computes another: by a sentence, and never in silence."""
    register()
    experts, model, body = make_head("experts"), make("llama"), make("llama").model
    two_heads = BertForPreTraining(BertConfig(**SIZES, dilated_attention=PATTERN))
    for each in (experts, model, two_heads.eval(), body):
        context_parallel(each, ContextParallel())
    assert experts(**sample()).loss.isfinite()
    said = message_of(lambda: experts(**sample(), output_router_logits=True))
    assert "output_router_logits" in said
    experts.config.output_router_logits = True
    model.loss_function = lambda logits, **_: logits.square().mean()
    for each, said in (
        (experts, "output_router_logits"),
        (model, "a loss_function"),
        (body, "LlamaModel computes no loss of single positions"),
        (two_heads, "BertForPreTraining computes no loss of single positions: call it"),
    ):
        assert said in message_of(lambda m=each: m(**sample()))
    assert two_heads(sample()["input_ids"]).prediction_logits.isfinite().all()

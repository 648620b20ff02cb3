"""What models of transformers compute from a whole sequence outside of attention, where ranks share the sequence.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from distributed import run
from helpers import message_of
from test_transformers_ranks import batches, loss_and_gradients
from tiny import NO_DROPOUT, PATTERN, SIZES, filled, make, tokens, with_norm
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    Phi3Config,
    Phi3ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers.integrations.neftune import activate_neftune, deactivate_neftune

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.integrations.transformers import context_parallel, parallel, register

SHORT = 12  # a sequence of 19 is longer, and a shard of 10 is not
FACTORS = {
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": SHORT,
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
PHI = {
    "original_max_position_embeddings": SHORT,
    "sliding_window": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
PHI |= {
    "bos_token_id": 1,
    "max_position_embeddings": 64,
    "rope_parameters": LONG,
    "num_key_value_heads": 2,
}


def llama(kind=LlamaForCausalLM, **more):
    register()
    return filled(kind(LlamaConfig(**SIZES, pad_token_id=0, dilated_attention=PATTERN, **more)))


def phi(**more):
    register()
    return filled(Phi3ForCausalLM(Phi3Config(**SIZES, **PHI, dilated_attention=PATTERN, **more)))


ROTARY = {
    "dynamic": lambda: llama(rope_parameters=DYNAMIC, max_position_embeddings=SHORT),
    "phi": phi,
}


def rank_rotates(rank, world_size):
    for name, make_model in ROTARY.items():
        # dynamic NTK remembers the longest sequence that it saw
        whole, shared = make_model(), make_model()
        context = ContextParallel(sharding="zigzag")
        handle = context_parallel(shared, context)
        # longer than before, and back to the lengths of pretraining
        for length in (19, 9, 30, 14, 19):
            ids = tokens(2, length)
            logits, expected = context.unshard(shared(ids).logits), whole(ids).logits
            torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
        kinds = batches(name)

        def check(model, kind, whole=whole, kinds=kinds, context=context):
            found = loss_and_gradients(model, kinds[kind], context)
            expected = loss_and_gradients(whole, kinds[kind])
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=5e-7)

        for kind in kinds:
            check(shared, kind)
        handle.remove()
        ids, compiled = tokens(1, 19), make_model()
        assert torch.equal(shared(ids).logits, whole(ids).logits)
        context_parallel(compiled, context)
        compiled.compile(backend="aot_eager")
        check(compiled, "plain")
        context.close()


def test_angles_that_go_by_the_length():
    """Catches longrope and dynamic NTK that choose their angles by the largest position of a shard."""
    run(2, rank_rotates, seconds=240)


def of_type(config_kind, kind, **more):
    register()
    sizes = {**SIZES, **NO_DROPOUT, "pad_token_id": 0, **more}
    return filled(kind(config_kind(**sizes, dilated_attention=PATTERN)))


def gradients(model, outputs):
    """Of a loss that every rank computes from the same outputs, for the parameters on which it depends: the average
    over the ranks, as of DDP."""
    grads = torch.autograd.grad(outputs.square().sum(), list(model.parameters()), allow_unused=True)
    grads = [x for x in grads if x is not None]
    for x in grads:
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return grads


def rank_pools(rank, world_size):
    for sharding in ("contiguous", "zigzag"):
        model, context = of_type(BertConfig, BertModel), ContextParallel(sharding=sharding)
        ids = tokens(2, 19)
        expected = model(ids)
        grads = gradients(model, expected.pooler_output)
        context_parallel(model, context)
        found, hidden = model(ids), context.shard(expected.last_hidden_state)
        torch.testing.assert_close(found.pooler_output, expected.pooler_output)
        torch.testing.assert_close(gradients(model, found.pooler_output), grads)
        torch.testing.assert_close(found.last_hidden_state, hidden)
        context.close()


def test_poolers():
    """Catches a pooler that takes the first row of each shard, before it is called or in it."""
    run(2, rank_pools, seconds=120)


def rank_scores(rank, world_size):
    context, ids = ContextParallel(sharding="zigzag"), tokens(2, 19)
    ids[1, 15:] = 0  # padding on the right

    def join(module, args, output):
        return replace(output, last_hidden_state=context.unshard(output.last_hidden_state))

    sizes = {"max_position_embeddings": 40, "pad_token_id": 1}
    roberta = of_type(RobertaConfig, RobertaForSequenceClassification, **sizes)
    for model in (llama(LlamaForSequenceClassification), roberta):
        expected = model(ids).logits
        grads = gradients(model, expected)
        context_parallel(model.base_model, context)
        model.base_model.register_forward_hook(join)
        found = model(ids).logits
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(model, found), grads)


def test_a_classifier_of_sequences():
    """It takes the last or the first row of what it has: refused (the census says so), and right as the page says."""
    run(2, rank_scores, seconds=120)


class Divided(LlamaModel):
    """A model of a user that divides by the length."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        output = super().forward(input_ids, position_ids=position_ids, **kwargs)
        output["last_hidden_state"] = output.last_hidden_state / output.last_hidden_state.shape[1]
        return output


class Deaf(LlamaModel):
    """... and one that passes no further keywords on."""

    def forward(self, input_ids=None, position_ids=None, use_cache=None, **kwargs):
        return super().forward(input_ids, position_ids=position_ids, use_cache=use_cache)


class Convolved(LlamaModel):
    """... and one in which neighbours meet outside of attention."""

    def __init__(self, config):
        super().__init__(config)
        self.before = nn.Conv1d(config.hidden_size, config.hidden_size, 3, padding=1)

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        embeddings = self.before(self.embed_tokens(input_ids).mT).mT
        return super().forward(inputs_embeds=embeddings, position_ids=position_ids, **kwargs)


class Own(LlamaModel):
    """... and one that counts positions by itself."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        return super().forward(input_ids, **kwargs)


def rank_refuses(rank, world_size):
    context = ContextParallel()
    kinds = {
        Divided: "Divided computes last_hidden_state from all rows of a sequence",
        with_norm(
            lambda x: x * (1 + x.shape[1])
        ): "Applied (norm) needs the rows of the whole sequence",
        Deaf: "the model received `parallel`, but did not pass it on to LlamaAttention",
        Convolved: "Convolved: positions are mixed outside of dilated attention",
        Own: "Own: LlamaRotaryEmbedding (rotary_emb) needs the rows of the whole",
    }
    for kind, said in kinds.items():
        message = message_of(lambda k=kind: context_parallel(llama(k), context))
        assert said in message, message
    parallel.BY_LENGTH = set()
    for name, make_model in ROTARY.items():
        message = message_of(lambda m=make_model: context_parallel(m(), context))
        assert "RotaryEmbedding (model.rotary_emb) needs the rows of the whole" in message, name


def test_the_tiny_copy_shows_it():
    """Also where the hooks on rotary embeddings are missing: the check does not go by names of rope types."""
    run(2, rank_refuses, seconds=120)


def rank_adds_noise(rank, world_size):
    model, ids = make("llama").train(), tokens(1, 12)
    context_parallel(model, ContextParallel())
    hook = activate_neftune(model, 5.0)

    def is_finite():
        return bool(model(ids, labels=ids).loss.isfinite())

    if world_size > 1:
        said = "neftune_noise_alpha=5.0: its noise is scaled by the length of the sequence"
        assert said in message_of(is_finite)
        model.eval()
    assert is_finite()
    model.train()
    deactivate_neftune(model, hook)
    assert is_finite()


@pytest.mark.parametrize("world_size", [1, 2])
def test_neftune(world_size):
    """Catches noise that is scaled by the length of a shard, and a refusal of noise where no sequence is cut."""
    run(world_size, rank_adds_noise, seconds=120)


class Adapted(nn.Module):
    """As PEFT wraps a model, all of whose own parameters are frozen: what it adds is trained."""

    def __init__(self, model):
        super().__init__()
        self.model = model.requires_grad_(False)
        torch.manual_seed(1)
        for layer in model.model.layers:
            added = nn.Linear(32, 32, bias=False, dtype=torch.float64)
            layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj, added)

    def get_base_model(self):
        return self.model

    def forward(self, **options):
        return self.model(**options)


def rank_adapts(rank, world_size):
    batch = batches("llama")["plain"]
    expected = loss_and_gradients(Adapted(make("llama")), batch)
    assert len(expected[1]) == 2
    adapted, context = Adapted(make("llama")), ContextParallel(sharding="zigzag")
    for wrapped in (adapted, nn.parallel.DistributedDataParallel(make("llama"))):
        message = message_of(lambda w=wrapped: context_parallel(w, context))
        assert f"got {type(wrapped).__name__}. If it wraps one (DDP, PEFT), pass the mo" in message
        assert "get_base_model()" in message
    context_parallel(adapted.get_base_model(), context)
    torch.testing.assert_close(
        loss_and_gradients(adapted, batch, context), expected, rtol=2e-6, atol=2e-7
    )


def test_lora():
    """Gradients of adapters in a frozen model are those of one process, and the error names the model to take."""
    run(2, rank_adapts, seconds=120)

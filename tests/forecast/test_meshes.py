"""The weight of a model against a step that is run, and the ranking of meshes."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ring_dilated_attention.commands.plan.decoders import encoder_decoder, longnet_decoder
from ring_dilated_attention.forecast.clock import Hardware
from ring_dilated_attention.forecast.meshes import (
    Mesh,
    Training,
    all_meshes,
    plan_mesh,
    ranked_meshes,
)
from ring_dilated_attention.forecast.model_weight import (
    HeldByModel,
    model_memory,
    weigh_activations,
)
from ring_dilated_attention.models import LongNetEncoder, LongNetLM, TorchscaleConfig
from ring_dilated_attention.models.longnet_config import LongNetConfig
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.simulate.weighing import weigh_attention

CONFIG = LongNetConfig(
    (64, 512), (1, 4), num_layers=4, embed_dim=64, num_heads=4, num_kv_heads=2, vocab_size=300
)
HARDWARE = Hardware(1e12, 1e9, 1e-6, gpus_per_host=4, host_bytes_per_second=1e10)


def test_parameters_are_the_models():
    with torch.device("meta"):
        model = LongNetLM(CONFIG)
    decoder = longnet_decoder(CONFIG)
    assert decoder.num_parameters == sum(x.numel() for x in model.parameters())
    assert decoder.block_parameters == sum(x.numel() for x in model.blocks[0].parameters())
    matrices = [x for x in model.parameters() if x.ndim == 2 and x is not model.embedding.weight]
    assert decoder.matrix_entries == sum(x.numel() for x in matrices)


def language_model(is_checkpointed):
    """How a model is planned, its modules, and its own loss, with six slices of logits for 6,000 positions."""
    model = LongNetLM(CONFIG, activation_checkpointing=is_checkpointed)
    return longnet_decoder(CONFIG), CONFIG.pattern, model, model.loss


def slide_encoder(is_checkpointed):
    """The same, of an encoder whose head reads the mean of all positions."""
    pattern, sizes = DilatedPattern((64, 512), (1, 8)), {"num_heads": 4, "ffn_dim": 64}
    sizes |= {"embed_dim": 32, "num_layers": 3}
    config = TorchscaleConfig(pattern, padding="exact", **sizes)
    encoder = LongNetEncoder(config, activation_checkpointing=is_checkpointed)
    embedding, head = nn.Embedding(100, 32), nn.Linear(32, 2)

    def loss(tokens):
        rows = encoder(embedding(tokens))
        return F.cross_entropy(head(rows.mean(1)).float(), tokens[0, :1] % 2)

    model = nn.ModuleList([embedding, encoder, head])
    return encoder_decoder(pattern, 100, **sizes), pattern, model, loss


@pytest.mark.parametrize(
    ("make", "num_positions", "dtype", "least", "most"),
    [
        (language_model, 512, torch.float32, 0.97, 1.03),
        (language_model, 6000, torch.float32, 0.97, 1.03),
        # a plan of a LongNetLM of these sizes may be below what it takes
        (slide_encoder, 4000, torch.float32, 1, 1.25),
        (slide_encoder, 4000, torch.bfloat16, 1, 1.25),
    ],
)
def test_activations_are_those_of_a_step(make, num_positions, dtype, least, most):
    """Of a step with data. Catches a loss, or a depth, that is extrapolated wrongly."""
    decoder, pattern, *_ = make(False)
    shards = make_shards("contiguous", (num_positions,))
    sharded_call = ShardedCall(pattern, shards, decoder.num_heads, decoder.num_kv_heads)
    sizes = Sizes(1, decoder.head_dim, dtype.itemsize)
    attention = weigh_attention(plan_exchange("none", sharded_call, 0), sizes, "cpu")
    weighed = weigh_activations(decoder, 1, num_positions, dtype, attention)
    tokens = torch.randint(100, (1, num_positions))
    for way, planned in weighed.items():
        *_, model, loss = make(way == "checkpointed")
        for parameter in model.to(dtype).parameters():
            parameter.grad = torch.zeros_like(parameter)
        with HeldByModel([tokens], attention) as held:
            loss(tokens).backward()
        assert least <= planned / held.peak_bytes <= most


def test_states_are_cut_over_ranks():
    decoder = longnet_decoder(CONFIG)
    whole, cut = (model_memory(decoder, 1000, num_shards, 4) for num_shards in (1, 4))
    assert whole.states == 4 * 4 * decoder.num_parameters
    assert cut.states == 4 * 4 * -(-decoder.num_parameters // 4)
    assert cut.working == 3 * 4 * decoder.block_parameters


def test_all_meshes():
    assert list(map(str, all_meshes(12, 100))) == ["12x1", "6x2", "4x3", "3x4", "2x6", "1x12"]
    assert list(map(str, all_meshes(8, 3))) == ["8x1", "4x2"]


def test_meshes_are_ranked_by_tokens_per_second(monkeypatch):
    """Less memory takes slower ways, and more sharing. What a rank holds is weighed once for all plans."""
    weigh = "ring_dilated_attention.forecast.meshes.weigh_activations"
    monkeypatch.setattr(weigh, cache(weigh_activations))
    job = Training(longnet_decoder(CONFIG), CONFIG.pattern, 8192, 1, 4, "cpu")
    plans = ranked_meshes(job, 4, HARDWARE, 1e12)
    assert {plan.mesh for plan in plans} == set(all_meshes(4, 8192))
    speeds = [plan.tokens_per_second for plan in plans]
    assert speeds == sorted(speeds, reverse=True)
    roomy = plans[0]
    assert roomy.mesh == Mesh(4, 1)  # nothing is sent but gradients
    for plan in plans:
        assert plan.tokens_per_second == pytest.approx(plan.mesh.data * 8192 / plan.seconds)
        assert plan.activations == "kept"
    tight = plan_mesh(job, roomy.mesh, HARDWARE, 0.7 * roomy.memory.total)
    assert tight.fits
    assert tight.activations == "checkpointed"
    assert tight.tokens_per_second < roomy.tokens_per_second
    plans = ranked_meshes(job, 4, HARDWARE, tight.memory.total / 8)
    assert not next(plan for plan in plans if plan.mesh == roomy.mesh).fits
    assert plans[-1].fits <= plans[0].fits

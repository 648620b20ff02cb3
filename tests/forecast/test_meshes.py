"""The weight of a model against a step that is run, and the ranking of meshes."""

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
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.simulate.weighing import weigh_attention

CONFIG = LongNetConfig(
    (64, 512), (1, 4), num_layers=4, embed_dim=64, num_heads=4, num_kv_heads=2, vocab_size=300
)
HARDWARE = Hardware(1e12, 1e9, 1e-6, gpus_per_host=4, host_bytes_per_second=1e10)


def training(config=CONFIG, seq_len=8192, batch=1):
    return Training(longnet_decoder(config), config.pattern, seq_len, batch, 4, "cpu")


def test_parameters_are_the_models():
    with torch.device("meta"):
        model = LongNetLM(CONFIG)
    decoder = longnet_decoder(CONFIG)
    assert decoder.num_parameters == sum(x.numel() for x in model.parameters())
    assert decoder.block_parameters == sum(x.numel() for x in model.blocks[0].parameters())
    linears = [x for x in model.modules() if isinstance(x, torch.nn.Linear)]
    assert decoder.matrix_entries == sum(x.weight.numel() for x in linears)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("num_positions", [512, 6000])
def test_activations_are_those_of_a_step(is_checkpointed, num_positions):
    """Of a step with data, through the loss of the model itself, with six slices of logits. Catches a loss, or a depth,
    that is extrapolated wrongly."""
    rank_plan = plan_exchange(
        "none", Job(CONFIG.pattern, make_shards("contiguous", (num_positions,)), 4, 2), 0
    )
    attention = weigh_attention(rank_plan, Sizes(1, 16, 4), "cpu")
    found = weigh_activations(longnet_decoder(CONFIG), 1, num_positions, torch.float32, attention)
    model = LongNetLM(CONFIG, activation_checkpointing=is_checkpointed)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(300, (1, num_positions))
    with HeldByModel([tokens], attention) as held:
        model.loss(tokens).backward()
    weighed = found["checkpointed" if is_checkpointed else "kept"]
    assert weighed == pytest.approx(held.peak_bytes, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_plan_of_an_encoder_is_not_below_what_it_takes(is_checkpointed, dtype):
    """Of a step with data. A plan of a LongNetLM of these sizes may be below it."""
    pattern, num_positions = DilatedPattern((64, 512), (1, 8)), 4000
    sizes = {"embed_dim": 32, "num_heads": 4, "ffn_dim": 64}
    decoder = encoder_decoder(pattern, 100, num_layers=3, **sizes)
    job = Job(pattern, make_shards("contiguous", (num_positions,)), 4, 4)
    sizes_of_call = Sizes(1, 8, dtype.itemsize)
    attention = weigh_attention(plan_exchange("none", job, 0), sizes_of_call, "cpu")
    weighed = weigh_activations(decoder, 1, num_positions, dtype, attention)
    config = TorchscaleConfig(pattern, padding="exact", num_layers=3, **sizes)
    encoder = LongNetEncoder(config, activation_checkpointing=is_checkpointed).to(dtype)
    embedding, head = nn.Embedding(100, 32, dtype=dtype), nn.Linear(32, 2, dtype=dtype)
    for parameter in (*embedding.parameters(), *encoder.parameters(), *head.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(100, (1, num_positions))
    with HeldByModel([tokens], attention) as held:
        F.cross_entropy(
            head(encoder(embedding(tokens)).mean(1)).float(), tokens[0, :1] % 2
        ).backward()
    planned = weighed["checkpointed" if is_checkpointed else "kept"]
    assert held.peak_bytes <= planned < 1.25 * held.peak_bytes


def test_states_are_cut_over_ranks():
    decoder = longnet_decoder(CONFIG)
    activations = weigh_activations(decoder, 1, 512, torch.float32, weigh_one(512))["kept"]
    whole, cut = (model_memory(decoder, activations, num, 4) for num in (1, 4))
    assert whole.states == 4 * 4 * decoder.num_parameters
    assert cut.states == 4 * 4 * -(-decoder.num_parameters // 4)
    assert cut.working == 3 * 4 * decoder.block_parameters


def weigh_one(num_positions):
    rank_plan = plan_exchange(
        "none", Job(CONFIG.pattern, make_shards("contiguous", (num_positions,)), 4, 2), 0
    )
    return weigh_attention(rank_plan, Sizes(1, 16, 4), "cpu")


def test_all_meshes():
    assert list(map(str, all_meshes(12, 100))) == ["12x1", "6x2", "4x3", "3x4", "2x6", "1x12"]
    assert list(map(str, all_meshes(8, 3))) == ["8x1", "4x2"]


def test_meshes_are_ranked_by_tokens_per_second():
    plans = ranked_meshes(training(), 4, HARDWARE, 1e12)
    assert {plan.mesh for plan in plans} == set(all_meshes(4, 8192))
    speeds = [plan.tokens_per_second for plan in plans]
    assert speeds == sorted(speeds, reverse=True)
    assert plans[0].mesh == Mesh(4, 1)  # nothing is sent but gradients
    for plan in plans:
        assert plan.tokens_per_second == pytest.approx(plan.mesh.data * 8192 / plan.seconds)
        assert plan.activations == "kept"


def test_less_memory_takes_slower_ways_and_more_sharing():
    job = training(seq_len=2**17)
    roomy = plan_mesh(job, Mesh(4, 1), HARDWARE, 1e12)
    tight = plan_mesh(job, Mesh(4, 1), HARDWARE, 0.7 * roomy.memory.total)
    assert tight.fits
    assert tight.activations == "checkpointed"
    assert tight.tokens_per_second < roomy.tokens_per_second
    too_little = tight.memory.total / 8
    plans = ranked_meshes(job, 4, HARDWARE, too_little)
    assert not next(plan for plan in plans if plan.mesh == Mesh(4, 1)).fits
    assert plans[-1].fits <= plans[0].fits

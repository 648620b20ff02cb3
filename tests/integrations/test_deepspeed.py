"""DeepSpeed ZeRO on sequences that ranks share, against one rank.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import pytest
import torch
from distributed import run
from steps import (
    LEARNING_RATE,
    MAX_NORM,
    PER_STEP,
    SAMPLES,
    Steps,
    assert_same,
    environment,
    make_loss,
    optimizer_of,
)
from tiny import PATTERN, SIZES
from torch.distributed.device_mesh import init_device_mesh
from transformers import BloomConfig, BloomModel, LlamaConfig, LlamaForCausalLM

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.integrations.transformers import register

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": MAX_NORM,
    "zero_allow_untested_optimizer": True,
    # or stage 3 would shard none of so small ones
    "zero_optimization": {"stage3_param_persistence_threshold": 0},
}


def steps(engine, samples_of):
    import deepspeed

    losses, norms = [], []
    for batch in SAMPLES.split(PER_STEP):
        loss = engine(samples_of(batch))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    parameters = {}
    for name, x in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([x]):
            parameters[name] = x.detach().clone()
    return Steps(losses, norms, parameters)


def rank_takes_steps(rank, world_size):
    """Two replicas of sequences that two ranks share, at every stage."""
    environment(rank, world_size)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    replica = mesh.get_local_rank("dp")
    parallel = ContextParallel(mesh["cp"], sharding="zigzag")
    for stage in (1, 2, 3):
        model = make_loss(parallel)
        config = CONFIG | {"zero_optimization": CONFIG["zero_optimization"] | {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
        assert engine.zero_optimization_stage() == stage
        found = steps(engine, lambda batch: parallel.shard(batch[replica : replica + 1]))
        assert len(set(found.losses)) == len(found.losses)
        losses = torch.tensor(found.losses)  # a replica's loss is that of its own sample
        torch.distributed.all_reduce(losses)
        assert_same(found._replace(losses=(losses / world_size).tolist()))
        engine.destroy()
    make_models()


def make_models():
    """transformers' models under ZeRO 3, which divides their parameters while they are made. The copy that is looked
    at is whole, and the model is divided as it was."""
    import deepspeed

    register()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, dilated_attention=PATTERN))
        with pytest.raises(ValueError, match="ALiBi's biases"):
            BloomModel(
                BloomConfig(
                    vocab_size=61, hidden_size=32, n_layer=1, n_head=4, dilated_attention=PATTERN
                )
            )
    assert all(x.numel() == 0 and x.ds_numel > 0 for x in model.parameters())


def test_replicas_of_sequences():
    """Without an mpu the ranks of a sequence are replicas to DeepSpeed, whose mean of gradients is the right one.
    Catches gradients that are twice too large, as DeepSpeed's own mpu makes them."""
    assert LEARNING_RATE * MAX_NORM > 0.1
    run(4, rank_takes_steps, seconds=240)

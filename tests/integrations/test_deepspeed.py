"""DeepSpeed ZeRO on sequences that ranks share, against one rank.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

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
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import ContextParallel

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


def rank_takes_steps(rank, world_size, stages, sharding, replicas):
    environment(rank, world_size)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("dp", "cp"))
    replica = mesh.get_local_rank("dp")
    parallel = ContextParallel(mesh["cp"], sharding=sharding)
    for stage in stages:
        model = make_loss(parallel)
        config = CONFIG | {"zero_optimization": CONFIG["zero_optimization"] | {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
        assert engine.zero_optimization_stage() == stage
        found = steps(engine, lambda batch: parallel.shard(batch.tensor_split(replicas)[replica]))
        if replicas > 1:  # a replica's loss is that of its own sample
            assert len(set(found.losses)) == len(found.losses)
            losses = [torch.tensor(x) for x in found.losses]
            for x in losses:
                torch.distributed.all_reduce(x)
            found = found._replace(losses=[x.item() / world_size for x in losses])
        assert_same(found)
        engine.destroy()


def test_sequences_of_two_ranks():
    """Without an mpu the ranks of a sequence are replicas to DeepSpeed, whose mean of gradients is the right one. At
    every stage, clipped. Catches gradients that are twice too large, as DeepSpeed's own mpu makes them."""
    assert LEARNING_RATE * MAX_NORM > 0.1
    run(2, rank_takes_steps, [1, 2, 3], "zigzag", 1, seconds=240)


def test_two_replicas_of_two_ranks():
    run(4, rank_takes_steps, [1, 2, 3], "contiguous", 2, seconds=240)

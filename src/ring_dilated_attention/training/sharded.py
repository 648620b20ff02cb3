"""`rda train --fsdp`: FSDP2 cuts parameters, gradients and optimiser state over the ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from ..models.longnet import LongNetBlock, LongNetLM
from ..models.longnet_config import LongNetConfig
from ..ranks.context import ContextParallel


def sharded_model(
    config: LongNetConfig, parallel: ContextParallel, *, activation_checkpointing: bool
) -> LongNetLM:
    """Make a model with its parameters cut over the ranks.

    While the model is made, a rank holds the embedding, the head and one block whole. Of all other blocks the rank
    holds only its shards.
    """
    with torch.device("meta"):
        model = LongNetLM(
            config, parallel=parallel, activation_checkpointing=activation_checkpointing
        )
    # The constructors of an uncut model's modules draw random numbers. Draw as many here, so that `reset_ends` and
    # `reset_block` then draw the same parameters as without --fsdp.
    nn.Embedding(config.vocab_size, config.embed_dim)
    for _ in model.blocks:
        LongNetBlock(config, parallel, "auto")
    nn.Linear(config.embed_dim, config.vocab_size, bias=False)
    mesh = init_device_mesh("cpu", (parallel.world_size,))
    for end in (model.embedding, model.head, model.final_layernorm):
        end.to_empty(device="cpu")
    model.reset_ends()
    for block in model.each_block():
        model.reset_block(block.to_empty(device="cpu"))
        fully_shard(block, mesh=mesh)
    # Set reshard_after_forward. Otherwise, after a `loss` without a backward, every rank would keep the embedding, the
    # last LayerNorm and the head whole.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    # Let `loss`, like `forward`, gather the embedding, the last LayerNorm and the head.
    register_fsdp_forward_method(model, "loss")
    return model

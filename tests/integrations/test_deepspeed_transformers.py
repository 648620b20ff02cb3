"""Models of transformers made under ZeRO 3, which divides their parameters while they are made."""

import pytest
from distributed import run
from steps import environment
from tiny import PATTERN, SIZES
from transformers import BloomConfig, BloomModel, LlamaConfig, LlamaForCausalLM

from ring_dilated_attention.integrations.transformers import register


def rank_makes_models(rank, world_size):
    environment(rank, world_size)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
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


def test_made_by_several_ranks():
    """The copy that is looked at is whole, and the model is divided as it was."""
    run(2, rank_makes_models, seconds=240)

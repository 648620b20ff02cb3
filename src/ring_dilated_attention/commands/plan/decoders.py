"""Makes the models whose memory `rda plan model` counts: LongNetLM, LongNetEncoder, and models of transformers."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...attention import save_attention
from ...forecast.model_weight import Decoder, DecoderWithLoss, count_decoder
from ...models.longnet import LongNetLM
from ...models.longnet_config import LongNetConfig
from ...models.torchscale.architecture import TorchscaleConfig
from ...models.torchscale.networks import LongNetEncoder
from ...pattern import DilatedPattern
from ..arguments import check_installed


def longnet_decoder(config: LongNetConfig) -> Decoder:
    def make(num_layers: int, is_checkpointed: bool) -> DecoderWithLoss:
        with torch.device("meta"):
            model = LongNetLM(
                replace(config, num_layers=num_layers), activation_checkpointing=is_checkpointed
            )
        head = model.head
        model.head = nn.Identity()  # type: ignore[assignment]
        return DecoderWithLoss(model, head, config.vocab_size)

    head_dim = config.embed_dim // config.num_heads
    num_kv_heads = config.num_kv_heads or config.num_heads
    return count_decoder(
        "a LongNetLM", make, config.num_layers, config.num_heads, num_kv_heads, head_dim
    )


def encoder_decoder(
    pattern: DilatedPattern, vocab_size: int, *, num_layers: int, **sizes: Any
) -> Decoder:
    """A LongNetEncoder between an embedding and a head. sizes: fields of TorchscaleConfig, such as embed_dim."""

    def make(num_layers: int, is_checkpointed: bool) -> DecoderWithLoss:
        config = TorchscaleConfig(pattern, padding="exact", num_layers=num_layers, **sizes)
        with torch.device("meta"):
            encoder = LongNetEncoder(config, activation_checkpointing=is_checkpointed)
            embedding = nn.Embedding(vocab_size, config.embed_dim)
            head = nn.Linear(config.embed_dim, vocab_size, bias=False)
        return DecoderWithLoss(nn.Sequential(embedding, encoder), head, vocab_size)

    num_heads = sizes["num_heads"]
    head_dim = sizes["embed_dim"] // num_heads
    return count_decoder("a LongNetEncoder", make, num_layers, num_heads, num_heads, head_dim)


def transformers_decoder(path: Path, pattern: DilatedPattern) -> Decoder:
    """A model of the library transformers, with `pattern` as its attention. path: the model's config.json, or a folder
    with one.

    Raises ValueError if the model cannot be made, cannot run the pattern, or has blocks that differ.
    """
    check_installed(["transformers"], "hf", "--config ")
    from transformers import AutoConfig, AutoModelForCausalLM

    from ...integrations.transformers import convert_to_dilated

    if not path.exists():  # otherwise transformers would look for the path on the network
        raise ValueError(f"--config {path}: there is no such file")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, dilated_attention=None)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        # The whole model is made, because only this shows whether its blocks are alike. On the device "meta" this takes
        # a tenth of a second for 60 blocks. `make` is called for at most 2 blocks, so no more are kept: converting and
        # copying 60 blocks would take many seconds.
        num_layers, num_parameters = config.num_hidden_layers, model.num_parameters()
        blocks = max((x for x in model.modules() if isinstance(x, nn.ModuleList)), key=len)
        blocks.append(deepcopy(blocks[0]))  # the second block of a model that has only one
        del blocks[2:]
        model.config.num_hidden_layers = 2
        convert_to_dilated(model, pattern)
    except Exception as error:  # a model's code may raise any error if config fields are wrong
        reason = " ".join(str(error).split())
        raise ValueError(f"--config {path}, with dilated attention: {reason}") from error

    def make(num_blocks: int, is_checkpointed: bool) -> DecoderWithLoss:
        # Copied together, `kept` is the list of blocks in `copied`.
        copied, kept = deepcopy((model, blocks))
        del kept[num_blocks:]
        copied.config.num_hidden_layers = num_blocks
        copied.config.use_cache = False
        copied.train()
        if is_checkpointed:
            options = {"use_reentrant": False, "context_fn": save_attention}
            # Use the new name of this method if transformers has it: newer versions warn about the older name.
            older = copied.gradient_checkpointing_enable
            getattr(copied, "activation_checkpointing_enable", older)(options)
        return DecoderWithLoss(copied.base_model, copied.get_output_embeddings(), config.vocab_size)

    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    decoder = count_decoder(
        f"transformers' {config.model_type}",
        make,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        getattr(config, "num_experts_per_tok", None),
    )
    if decoder.num_parameters != num_parameters:
        raise ValueError(
            f"--config {path}: {num_layers} blocks like its first two would have {decoder.num_parameters:,} "
            f"parameters, but its blocks differ and have {num_parameters:,}. Give a config whose blocks are alike "
            "after the first (such as first_k_dense_replace=1, mlp_only_layers=[], decoder_sparse_step=1)."
        )
    return decoder

"""Tiny models of transformers, and the definition as an attention function of theirs.

B batch, H query heads, M rows, D head dim.
"""

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    Qwen3Config,
    RobertaConfig,
)

from ring_dilated_attention.integrations.transformers import register
from ring_dilated_attention.integrations.transformers.config import pattern_of
from ring_dilated_attention.reference import dilated_attention_reference

PATTERN = {"segment_lengths": [4, 9], "dilation_rates": [1, 3]}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}

CONFIGS = {
    "llama": lambda **more: LlamaConfig(**SIZES, num_key_value_heads=2, **more),
    "qwen3": lambda **more: Qwen3Config(**SIZES, **GROUPED, **more),
    "mistral": lambda **more: MistralConfig(**SIZES, **GROUPED, sliding_window=None, **more),
    "gpt_neox": lambda **more: GPTNeoXConfig(**SIZES, **more),
    "bert": lambda **more: BertConfig(**SIZES, **NO_DROPOUT, **more),
    # counts positions from the row behind that of padding
    "roberta": lambda **more: RobertaConfig(
        **SIZES, **NO_DROPOUT, **{**more, "pad_token_id": 1}, max_position_embeddings=40
    ),
}
ENCODERS = ["bert", "roberta"]
DECODERS = [name for name in CONFIGS if name not in ENCODERS]


def make(name, pattern=PATTERN, dtype=torch.float64, **more):
    """A model with random parameters, the same for each pattern and dtype; pattern=None for torch's attention."""
    register()
    config = CONFIGS[name](
        dilated_attention=pattern, pad_token_id=0, eos_token_id=None, bos_token_id=None, **more
    )
    kind = AutoModelForMaskedLM if name in ENCODERS else AutoModelForCausalLM
    return filled(kind.from_config(config)).to(dtype)


def filled(model):
    """With parameters larger than transformers', so that attention is far from uniform; the same in each."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15) if parameter.dim() > 1 else None
    return model.eval().double()


def tokens(batch, length, seed=1):
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def by_definition(module, query, key, value, attention_mask, *, scaling, is_causal=None, **options):
    """attention_mask: the one that the model was given, (B, M), or None."""
    is_causal = module.is_causal if is_causal is None else is_causal
    pattern = pattern_of(module.config, is_causal=is_causal)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    batch, num_rows = query.shape[:2]
    valid = (
        torch.ones(batch, num_rows, dtype=torch.bool) if attention_mask is None else attention_mask
    )
    positions, borders = options.get("position_ids"), options.get("cu_seq_lens_q")
    out = torch.zeros_like(query)
    for b in range(batch):
        rows = valid[b].nonzero().flatten()
        documents = [0, len(rows)]
        if borders is not None:
            documents = borders.tolist()
        elif attention_mask is None and positions is not None:
            starts = (positions[b % len(positions)].diff() != 1).nonzero().flatten() + 1
            documents = [0, *starts.tolist(), num_rows]
        one = [x[b : b + 1, rows] for x in (query, key, value)]
        found = dilated_attention_reference(*one, pattern, cu_seqlens=documents, scale=scaling)[0]
        out[b, rows] = found[0].to(out.dtype)
    return out, None


AttentionInterface.register("by_definition", by_definition)
AttentionMaskInterface.register(
    "by_definition", lambda *_, attention_mask=None, **__: attention_mask
)


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def with_norm(function):
    """A class of models as users write them: its last norm is replaced by a function of all rows."""

    class Normed(LlamaModel):
        def __init__(self, config):
            super().__init__(config)
            self.norm = Applied(function)

    return Normed

"""What becomes of each architecture of transformers if two ranks share its sequences: `python
tests/integrations/census_ranks.py` writes architectures_over_ranks.json, which test_transformers_census.py computes
anew and compares. Of the models in architectures.json that are "equal", and of their classifiers of sequences:

"right"     two ranks give the numbers of one, also with each rope_type whose angles go by the length
"refused"   context_parallel refuses it, by this sentence
"""

import copy
import json
from pathlib import Path

import torch
import transformers
from census import LIST, configs, inputs_of, made, said, written
from census_as_trained import over_ranks
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.integrations.transformers import context_parallel, register
from ring_dilated_attention.integrations.transformers.probe import FAILURES

LIST_OVER_RANKS = Path(__file__).with_name("architectures_over_ranks.json")
SHARES = 12
SHORT = 12  # a rank has 10 of 20 positions


def architectures_over_ranks():
    """The type of a config and the name of a model, by "type of config: name of the model"."""
    equal = [
        name for name, (outcome, _) in json.loads(LIST.read_text()).items() if outcome == "equal"
    ]
    found = {name: tuple(name.split(": ")) for name in equal}
    for kind in {kind for kind, name in found.values() if name.endswith("Model")}:
        classifier = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
        if classifier is not None:
            found[f"{kind}: {classifier}"] = kind, classifier
    return dict(sorted(found.items()))


def rotary(config):
    """Fields that give a config's rotary embedding the rope types whose angles go by the length."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        return []
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    long = {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
    long |= {"short_mscale": 1.0, "long_mscale": 1.2, "original_max_position_embeddings": SHORT}
    rope = {**rope, "factor": 4.0}
    return [
        {"rope_parameters": {**rope, "rope_type": "dynamic"}, "max_position_embeddings": SHORT},
        {
            "rope_parameters": {**rope, "rope_type": "longrope", **long},
            "original_max_position_embeddings": SHORT,
        },
    ]


@torch.no_grad()
def outcome_over_ranks(kind, name, parallel):
    """The outcome, and by which rope types besides its own it is right, or why it is refused."""
    register()
    config_class, model_class = CONFIG_MAPPING[kind], getattr(transformers, name)
    for config in configs(config_class):
        if isinstance(config, Exception):
            continue
        outcome, how = compare_over_ranks(model_class, config_class, config.to_dict(), parallel)
        if outcome != "not built":
            break
    ropes = []
    if outcome == "right" and name.endswith("Model"):
        for fields in rotary(config):
            rope_type = fields["rope_parameters"]["rope_type"]
            outcome, how = compare_over_ranks(
                model_class, config_class, {**config.to_dict(), **fields}, parallel
            )
            if outcome == "right":
                ropes.append(rope_type)
            elif outcome != "not built":
                return [outcome, f"{rope_type}: {how}"]
        return ["right", ", ".join(ropes)]
    return [outcome, how]


def compare_over_ranks(model_class, config_class, fields, parallel):
    def model():
        return made(model_class, config_class, copy.deepcopy(fields), "dilated")

    try:
        whole_model = model()
        inputs = inputs_of(whole_model)
        expected = outputs(whole_model(**inputs))
    except FAILURES as error:
        return ["not built", said(error)]
    shared = model()
    try:
        context_parallel(shared, parallel)
    except ValueError as error:
        return ["refused", str(error)]
    found = outputs(shared(**inputs))
    for field, whole in expected.items():
        x = found[field]
        x = x if x.shape == whole.shape else parallel.unshard(x)
        error = float((x - whole).abs().max() / whole.abs().max())
        if not error <= 1e-5:
            return ["another function", f"{field} is off by {error:.0e}"]
    return ["right", ""]


def outputs(output):
    return {
        field: x for field, x in output.items() if isinstance(x, Tensor) and x.is_floating_point()
    }


def rank_of_census(rank, world_size, names):
    parallel = ContextParallel()
    everything = architectures_over_ranks()
    return {name: outcome_over_ranks(*everything[name], parallel) for name in names}


def main():
    names = [*architectures_over_ranks()]
    for share in range(SHARES):
        outcomes = over_ranks(2, rank_of_census, names[share::SHARES])
        written(LIST_OVER_RANKS, outcomes)


if __name__ == "__main__":
    main()

"""What becomes of each architecture of transformers over ranks with the attention that it was trained with: `python
tests/integrations/census_as_trained.py` writes architectures_as_trained.json, which test_transformers_census.py
computes anew and compares. One process has the model's own eager attention.

"equal"      on 2 and on 3 ranks a tiny model in float32 has the outputs of one process, its loss, and its gradients
"refused"    context_parallel refuses it, by this sentence
"not built"  no tiny config of it is a model that runs with its own attention, by this error

An architecture that is missing here is what architectures.json says of it, for the same reason: a model of parts, one
that attends across sequences, one whose positions meet elsewhere, or one that is not built.
"""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from census import LIST, MOST, configs, fill, inputs_of, said, written
from distributed import run
from torch import Tensor
from transformers import CONFIG_MAPPING, AttentionInterface

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.integrations.transformers import context_parallel, register
from ring_dilated_attention.integrations.transformers.attention_function import attend
from ring_dilated_attention.integrations.transformers.config import AS_TRAINED
from ring_dilated_attention.integrations.transformers.probe import FAILURES
from ring_dilated_attention.ranks.reduce import all_reduce

LIST_AS_TRAINED = Path(__file__).with_name("architectures_as_trained.json")
SHARES = 16
WINDOWS = {"sliding_window": 5, "local_attention": 7, "use_sliding_window": True}
# float32 keeps 1e-7 of a number. Two layers lose a hundred times that, and gradients through their norms a thousand.
LARGEST_ERROR, LARGEST_OF_GRADIENTS = 2e-5, 1e-4
# What architectures.json says of models that are refused whatever their layers are.
ANYHOW = ("is made of parts", "attends across sequences", "positions are mixed")
noted: set[str] = set()  # the kinds of attention that a model's layers asked for


def architectures_as_trained():
    """The type of a config and the name of a model, by "type of config: name of the model"."""
    found = {}
    for name, (outcome, how) in json.loads(LIST.read_text()).items():
        is_without_windows = outcome == "not built" and "'sliding_window'" not in how
        if not is_without_windows and not any(words in how for words in ANYHOW):
            kind, model = name.split(": ")
            found[name] = kind, model
    return found


def attend_noted(module, *args, **options):
    noted.add("windows" if options.get("sliding_window") else "dense")
    if options.get("s_aux") is not None:
        noted.add("sinks")
    return attend(module, *args, **options)


def outcome_as_trained(kind, name, contexts):
    """contexts: of 2 ranks, where this rank is one of them, and of 3. First with windows, then without."""
    register()
    config_class, model_class = CONFIG_MAPPING[kind], getattr(transformers, name)
    failures: list[str] = []
    refusals: list[str] = []
    for sizes in (WINDOWS, None):
        for config in configs(config_class, sizes):
            try:
                if isinstance(config, Exception):
                    raise config
                with torch.device("meta"):
                    model = model_class(copy.deepcopy(config))
                size = sum(x.numel() for x in model.parameters())
                if size > MOST:
                    raise ValueError(f"{size:,} parameters")
                config._attn_implementation = "eager"
                model = fill(model_class(config))
                inputs = inputs_of(model)
                expected = computed(model, inputs, None)
            except FAILURES as error:
                failures.append(said(error))
                continue
            try:
                context_parallel(model, contexts[-1]).remove()
            except ValueError as error:
                refusals.append(str(error))
                if "does not run" in str(error):
                    continue
                break
            outcome, how = compared(model, inputs, expected, contexts)
            if refusals:
                how += f"; another config is refused: {refusals[0]}"
            return [outcome, how]
    return ["refused", refusals[0]] if refusals else ["not built", failures[0]]


def computed(model, inputs, parallel):
    """Outputs, the loss and gradients, whole; and why the model computes no loss over ranks, or nothing."""
    why_no_loss = ""
    num_ranks = 1 if parallel is None else parallel.world_size
    found = {}
    for field, x in model(**inputs).items():
        if isinstance(x, Tensor) and x.is_floating_point():
            whole = parallel is None or x.dim() < 3
            found[field] = x if whole else parallel.unshard(x)
    loss = None
    if "input_ids" in inputs and type(model).__name__.endswith(("ForCausalLM", "ForMaskedLM")):
        try:
            loss = model(**inputs, labels=inputs["input_ids"]).loss
        except FAILURES as error:
            why_no_loss = said(error)
    if loss is not None:
        found["loss"] = loss
    else:  # of the whole, on every rank; a norm may have made all squares one
        loss = sum((x * torch.arange(x.shape[-1]).cos()).square().mean() for x in found.values())
    model.zero_grad()
    loss.backward()
    for at, parameter in model.named_parameters():
        if parameter.grad is not None:
            total = (
                parameter.grad if parallel is None else all_reduce(parallel.ranks, parameter.grad)
            )
            found[f"gradient of {at}"] = total / num_ranks
    return {field: x.detach().clone() for field, x in found.items()}, why_no_loss


def compared(
    model,
    inputs,
    expected,
    contexts,
):
    noted.clear()
    outcomes: list[list[str]] = []  # of all contexts, since other ranks compare in all
    for parallel in contexts:
        handle = context_parallel(model, parallel)
        AttentionInterface.register(AS_TRAINED, attend_noted)
        try:
            found, why_no_loss = computed(model, inputs, parallel)
            outcomes.append(difference(found, expected[0], why_no_loss))
        except FAILURES as error:
            outcomes.append(["fails", said(error)])
        handle.remove()
    return next((how for how in outcomes if how[0] != "equal"), outcomes[-1])


def difference(found, expected, why_no_loss):
    if why_no_loss:  # the gradients are of another loss
        expected = {at: x for at, x in expected.items() if "gradient" not in at and at != "loss"}
    largest = max([float(x.abs().max()) for at, x in expected.items() if "gradient" in at] or [1])
    for field, whole in expected.items():
        scale, most = float(whole.abs().max()), LARGEST_ERROR
        if "gradient" in field:
            scale, most = largest, LARGEST_OF_GRADIENTS
        error = float((found[field] - whole).abs().max()) / scale
        if not error <= most:
            return ["another function", f"{field}, off by {error:.0e}"]
    kinds = ", ".join(sorted(noted))
    return ["equal", f"{kinds}; no loss: {why_no_loss}" if why_no_loss else kinds]


def rank_of_census(rank, world_size, names):
    torch.set_num_threads(1)
    three, pair = ContextParallel(), dist.new_group([0, 1])
    contexts = [ContextParallel(pair), three] if rank < 2 else [three]
    everything = architectures_as_trained()
    outcomes = {}
    for name in names:
        outcomes[name] = outcome_as_trained(*everything[name], contexts)
    return outcomes


def over_ranks(num_ranks, outcomes_of, names):
    """The first two ranks must agree. A third may take no part in a comparison, and not see what went wrong in it."""
    outcomes, other, *_ = run(num_ranks, outcomes_of, names, seconds=1200)
    assert outcomes == other
    return outcomes


def main():
    chosen = [*architectures_as_trained()]
    for share in [int(word) for word in sys.argv[1:]] or range(SHARES):
        outcomes = over_ranks(3, rank_of_census, chosen[share::SHARES])
        written(LIST_AS_TRAINED, outcomes)


if __name__ == "__main__":
    main()

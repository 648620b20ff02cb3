"""Whether a model of transformers attends by our function and by nothing else: seen in forwards of a tiny copy.

The copy has the layers of the model, narrower ones. It runs with each position alone in its segment: whatever else a
position then sees, it sees past our function. And it runs with one segment of all: that is the model's own attention.
"""

import copy
import re
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import MODEL_MAPPING, PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from ...pattern import DilatedPattern
from .attention import attend
from .config import FIELD, NAME, SEEN, crosses, pattern_of

ROWS = 8
WIDTHS = re.compile("vocab_size|ffn_dim|d_ff|.*intermediate_size|embedding_size")  # of a config, and of no cost at 64
NARROW = 64
ALONE, WHOLE = DilatedPattern((1,), (1,)), DilatedPattern.dense()


@cache
def watch_models() -> None:
    """From now on a model is checked when it is made or loaded: torch says when it is given its first module."""
    register_module_module_registration_hook(_check_made)


def _check_made(module: nn.Module, name: str, part: nn.Module | None) -> None:
    if isinstance(module, PreTrainedModel) and not module._modules and module.config._attn_implementation == NAME:
        check_model(type(module), module.config)


def attend_seen(module: nn.Module, query_BHMD: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    """The attention of tiny copies, whose modules keep that they have called it, with how many rows."""
    setattr(module, SEEN, query_BHMD.shape[2])
    return attend(module, query_BHMD, *args, **options)


def check_model(kind: type[PreTrainedModel], config: Any) -> bool:
    """Whether the attention of a model of this class is causal. config: with the pattern.

    Raises:
        ValueError: naming the module in which positions meet past dilated attention, or what else cannot be had.
    """
    name = kind.__name__
    refuse_config(name, config)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        pattern_of(config, is_causal=True).check_heads(heads, getattr(config, "num_key_value_heads", None) or heads)
    key = kind, config.to_json_string(use_diff=False)
    if key not in _checked:
        here = torch.device("cpu"), local_torch_dtype(torch.float32, name), torch.random.fork_rng(devices=[])
        with ExitStack() as stack:  # models are loaded on the device "meta", in a dtype of theirs
            for context in (*here, torch.no_grad()):
                stack.enter_context(context)
            _checked[key] = _check_copies(name, [kind, *_base_of(config)], config)
    return _checked[key]


_checked: dict[tuple[type, str], bool] = {}


def _base_of(config: Any) -> list[type]:
    """The model of transformers for a config: parts of models are often of classes that do not run alone."""
    base = MODEL_MAPPING.get(type(config), ())
    return [*base] if isinstance(base, tuple) else [base]


def _check_copies(name: str, kinds: list[type], config: Any) -> bool:
    failures: list[Exception] = []
    for kind in kinds:
        try:
            model = _tiny(kind, config)
            inputs = _inputs(model)
            whole = _traced(model, inputs, WHOLE)
        except Exception as error:  # whatever a model of others raises
            failures.append(error)
            continue
        return _check_copy(name, model, inputs, whole)
    error = failures[0]
    said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    raise ValueError(f"{name} does not run with dilated attention, as a tiny copy of it shows: {said}") from error


def _check_copy(name: str, model: Any, inputs: dict[str, Tensor], whole: "Trace") -> bool:
    modules = dict(model.named_modules())
    callers = {at: module for at, module in modules.items() if hasattr(module, SEEN)}
    other = _past_ours(model, inputs, callers)
    for at in whole if other is None else ():
        within = any(f"{caller}.".startswith(f"{at}.") or at.startswith(f"{caller}.") for caller in callers)
        if "attention" in type(modules[at]).__name__.lower() and at and not within:
            other = at
    if other is not None or not callers:
        where = f" in {type(modules[other]).__name__} ({other})" if other else ""
        raise ValueError(
            f"{name}: positions meet{where} without dilated attention, so that it would compute another function than "
            "its config says. Use a model whose attention is all of transformers' attention interface."
        )
    causal = {bool(getattr(module, "is_causal", True)) for module in callers.values()}
    if len(causal) > 1:
        raise ValueError(f"{name} has attention modules that are causal and others that are not: convert its parts.")
    found, own = whole[""][1], _traced(model, inputs, None)[""][1]
    if not torch.allclose(found, own, rtol=1e-3, atol=1e-3 * float(own.abs().max())):
        kinds = ", ".join(sorted({type(module).__name__ for module in callers.values()}))
        raise ValueError(
            f"{name}: dilated attention with one segment of all positions is not the attention of {kinds}, which masks "
            "or changes the scores in ways that it does not tell. Use another attn_implementation for this model."
        )
    return causal.pop()


def _past_ours(model: Any, inputs: dict[str, Tensor], callers: dict[str, nn.Module]) -> str | None:
    """The innermost module whose output changes at more positions than what it is given, with each position alone."""
    rows = next((getattr(module, SEEN) for module in callers.values()), ROWS)
    layer = next((re.match(r".*?\.\d+(?=\.)|.*?\d+(?=\.)", at) for at in callers), None)
    changed, stir = {**inputs}, None if layer is None else layer[0]
    if "input_ids" in inputs:
        changed["input_ids"], stir = inputs["input_ids"].clone(), None
        changed["input_ids"][0, ROWS // 2] = inputs["input_ids"][0, 0]
    before, after = _traced(model, inputs, ALONE), _traced(model, changed, ALONE, stir)

    def meet(x: Tensor, y: Tensor) -> bool:
        if x.dim() != 3 or x.shape[1] != rows or x.shape != y.shape:
            return False
        change_N = (x - y).abs().amax((0, 2))
        return bool((change_N > 1e-3 * change_N.max()).sum() > 1)

    for at, (given, output) in before.items():
        if meet(output, after[at][1]) and not meet(given, after[at][0]):
            return at
    return None


Trace = dict[str, tuple[Tensor, Tensor]]


def _traced(model: Any, inputs: dict[str, Tensor], pattern: DilatedPattern | None, stir: str | None = None) -> Trace:
    """What each module is given first and returns first, by its name, in the order in which modules end.

    pattern: None for the model's own attention. stir: the layer that is given something else at one position."""
    found: Trace = {}

    def keep(at: str) -> Any:
        def hook(module: nn.Module, args: tuple, options: dict, output: Any) -> None:
            result = _first(output)
            if result is not None and at not in found:
                given = _first([*args, *options.values()])
                found[at] = (result if given is None else given).clone(), result.clone()

        return hook

    if pattern is None:
        model.config._attn_implementation = "eager"
    else:
        setattr(model.config, FIELD, pattern)
        model.config._attn_implementation = SEEN
    hooks = [module.register_forward_hook(keep(at), with_kwargs=True) for at, module in model.named_modules()]
    if stir is not None:
        hooks.append(model.get_submodule(stir).register_forward_pre_hook(_stir))
    model(**inputs)
    for hook in hooks:
        hook.remove()
    return found


def _first(nested: Any) -> Tensor | None:
    while nested is not None and not isinstance(nested, Tensor):
        if isinstance(nested, dict):
            nested = [*nested.values()]
        nested = next((x for x in nested if x is not None), None) if isinstance(nested, (list, tuple)) else None
    return nested if nested is not None and nested.is_floating_point() else None


def _stir(module: nn.Module, args: tuple) -> tuple:
    args[0][:, args[0].shape[1] // 2] += 1
    return args


def _tiny(kind: type, config: Any) -> Any:
    config = copy.deepcopy(config)
    _narrow(config)
    setattr(config, FIELD, WHOLE)
    config._attn_implementation = SEEN
    model = kind(config).float().eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        else:
            parameter.uniform_(0.5, 1)
    return model


def _narrow(config: Any) -> None:
    """Fewer heads, of the same width, and other widths of NARROW: what layers there are, and what they ask, stays."""
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 4:
        groups = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or hidden // heads
        fewer = min(groups, 2) if groups != heads else 4
        if groups != heads:
            config.num_key_value_heads = fewer
        elif getattr(config, "num_key_value_heads", None):
            config.num_key_value_heads = 4
        config.num_attention_heads = 4
        config.hidden_size = 4 * width
    for field in vars(config):
        value = getattr(config, field)
        if isinstance(value, int) and not isinstance(value, bool):
            if WIDTHS.fullmatch(field) and value > NARROW:
                setattr(config, field, NARROW)
            elif field.endswith("_token_id") and value >= NARROW:
                setattr(config, field, value % NARROW)


def _inputs(model: Any) -> dict[str, Tensor]:
    config = model.config
    if model.main_input_name == "pixel_values":
        sides = getattr(config, "image_size", 32)
        sides = (sides, sides) if isinstance(sides, int) else tuple(sides)
        return {"pixel_values": torch.randn(1, getattr(config, "num_channels", 3), *sides)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(1, 4000)}
    if model.main_input_name != "input_ids":
        raise ValueError(f"its input is {model.main_input_name}, which is not known")
    special = {value for field, value in vars(config).items() if field.endswith("_token_id")}
    ids = [x for x in range(config.vocab_size) if x not in special][-ROWS:]
    return {"input_ids": torch.tensor([ids])}


def refuse_config(name: str, config: Any) -> None:
    """What a config alone shows."""
    parts = [part for part in config.sub_configs if getattr(config, part, None) is not None]
    if parts:
        raise ValueError(
            f"{name} is made of parts with configs of their own ({', '.join(sorted(parts))}): convert the part that "
            "you mean."
        )
    if crosses(config):
        raise ValueError(f"{name} attends across sequences, and dilated attention is self-attention.")
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types is None and window is not None:
        raise ValueError(
            f"{name} has sliding_window={window}: a sliding window is another pattern. Load the model with "
            "sliding_window=None."
        )
    others = sorted(set(types or ()) - {"full_attention"})
    if others:
        raise ValueError(f"{name} has layers of {', '.join(others)}: dilated attention replaces full_attention alone.")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"{name} has attn_logit_softcapping={config.attn_logit_softcapping}: dilated attention does not cap scores."
        )

"""Whether a model of transformers attends by our function and by nothing else: seen in forwards of a tiny copy.

The copy has the layers of the model, narrower. With each position alone in its segment, what a position still sees of
others it sees past our function. With one segment of all positions, the copy must give what its own attention gives.
"""

import copy
import re
import sys
from contextlib import ExitStack
from functools import cache, partial
from traceback import walk_tb
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._pytree import tree_leaves
from transformers import MODEL_MAPPING, PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from ...pattern import DilatedPattern
from .attention import attend
from .config import FIELD, NAME, SEEN, crosses, pattern_of

ROWS = 8
ALONE, WHOLE = DilatedPattern((1,), (1,)), DilatedPattern.dense()
# What makes a copy small without another structure: fields of configs, and the most that they are in it.
NARROW = {r"vocab_size|ffn_dim|d_ff|embedding_size|\w*intermediate_size": 64, r"(n|moe_num|num)_\w*experts": 32}
MOST = 200_000_000  # parameters of a copy: Llama-3.1-405B's has 112, Gemma-7B's 123, Qwen3-30B-A3B's 190 million
# A model of others may raise anything of these where it takes no attention but its own.
FAILURES: tuple[type[Exception], ...] = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError)
FAILURES += (RuntimeError, TypeError, ValueError, StrictDataclassError)


@cache
def watch_models() -> None:
    """From now on a model is checked when it is made or loaded: torch says when a module is given another."""
    register_module_module_registration_hook(_check_made)


def _check_made(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """At the first child of a model, when its class and config are known."""
    if not issubclass(type(module), PreTrainedModel) or module._modules:  # others may not be asked for anything yet
        return
    config = module.__dict__.get("config")
    name = getattr(config, "_attn_implementation", None)
    if name == NAME:
        check_model(type(module), module.config)
    elif getattr(config, FIELD, None) is not None and name in ("sdpa", "eager"):  # as of a part, by a whole's config
        raise ValueError(
            f"{type(module).__name__} would have attn_implementation={name!r}, and its config has a pattern. Name "
            f"the attention ({NAME!r}, or of a part {{'text_config': {NAME!r}}}), or set config.{FIELD} = None."
        )


def attend_seen(module: nn.Module, query_BHMD: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    """The attention of tiny copies, whose modules keep that they have called it, with how many rows."""
    setattr(module, SEEN, query_BHMD.shape[2])
    return attend(module, query_BHMD, *args, **options)


def check_model(kind: type[PreTrainedModel], config: Any) -> bool:
    """Whether the attention of models of this class and config, which has a pattern, is causal.

    Raises:
        ValueError: naming the module in which positions meet without dilated attention, or what it cannot compute.
    """
    name, heads = kind.__name__, getattr(config, "num_attention_heads", None)
    if why := _why_another(config):
        raise ValueError(f"{name} {why}")
    pattern = pattern_of(config, is_causal=True)
    if isinstance(heads, int):
        pattern.check_heads(heads, getattr(config, "num_key_value_heads", None) or heads)
    key = kind, repr(config.to_dict())  # a user's config may hold what is no JSON
    if key not in _causal:
        # transformers has classes that do not run alone; what a class of a user adds, its base does not show.
        base = MODEL_MAPPING.get(type(config), ()) if kind.__module__.startswith("transformers.") else ()
        here = torch.device("cpu"), local_torch_dtype(torch.float32, name), torch.random.fork_rng(devices=[])
        with ExitStack() as stack:  # models are made on the device "meta", in a dtype of theirs, under autocast
            for context in (*here, torch.autocast("cpu", enabled=False), torch.no_grad()):
                stack.enter_context(context)
            if (zero := sys.modules.get("deepspeed.runtime.zero.partition_parameters")) is not None:
                zero.shutdown_init_context()  # or ZeRO 3 would divide the copy's parameters among ranks
                stack.callback(zero.restore_init_context)
            _causal[key] = _check_copies(name, [kind, *(base if isinstance(base, tuple) else [base])], config)
    return _causal[key]


_causal: dict[tuple[type, str], bool] = {}


def _why_another(config: Any) -> str | None:
    """What the config itself says against dilated attention, or None."""
    inner = sorted(name for name in config.sub_configs if getattr(config, name, None) is not None)
    if inner:
        return f"is made of parts with configs of their own ({', '.join(inner)}): convert the part that you mean."
    if crosses(config):
        return "attends across sequences, and dilated attention is self-attention."
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types is None and window is not None:
        remedy = "a sliding window is another pattern. Load the model with sliding_window=None."
        return f"has sliding_window={window}: {remedy}"
    if others := ", ".join(sorted(set(types or ()) - {"full_attention"})):
        return f"has layers of {others}: dilated attention replaces full_attention alone."
    cap = getattr(config, "attn_logit_softcapping", None)
    return None if cap is None else f"has attn_logit_softcapping={cap}: dilated attention does not cap scores."


class Refusal(ValueError):
    """What a copy that runs has shown."""


def _check_copies(name: str, kinds: list[type], config: Any) -> bool:
    """By the first class of which a copy runs."""
    failures: list[Exception] = []
    for kind in kinds:
        try:
            return _check_copy(name, _tiny(kind, config))
        except Refusal:
            raise
        except FAILURES as error:
            failures.append(error)
    first = failures[0]
    said = str(first)
    if type(first) is not ValueError:
        frames = [frame.f_locals.get("self") for frame, _ in walk_tb(first.__traceback__)]
        at = next((type(module).__name__ for module in reversed(frames) if isinstance(module, nn.Module)), name)
        said = f"{first!r} in {at}"
    raise ValueError(f"{name} does not run with dilated attention, as a tiny copy of it shows: {said}") from first


def _check_copy(name: str, model: Any) -> bool:
    whole, modules = _trace(model, WHOLE), dict(model.named_modules())
    callers = {at: module for at, module in modules.items() if hasattr(module, SEEN)}
    other = _past_ours(model, callers)
    if other is None:
        around = {at for caller in callers for at in modules if f"{caller}.".startswith(f"{at}.")}
        inside = tuple(f"{caller}." for caller in callers)
        named = [at for at in whole if "attention" in type(modules[at]).__name__.lower()]
        other = next((at for at in reversed(named) if at and at not in around and not at.startswith(inside)), None)
    if other is not None or not callers:
        where = f" in {type(modules[other]).__name__} ({other})" if other else ""
        raise Refusal(
            f"{name}: positions meet{where} without dilated attention, so that it would compute another function than "
            "its config says. Use a model whose attention is all of transformers' attention interface."
        )
    causal = {bool(getattr(module, "is_causal", True)) for module in callers.values()}
    if len(causal) > 1:
        raise Refusal(f"{name} has attention modules that are causal and others that are not: convert its parts.")
    found, own = whole[""][1], _trace(model, None)[""][1]
    if not torch.allclose(found, own, rtol=1e-3, atol=1e-3 * float(own.abs().max())):
        kinds = ", ".join(sorted({type(module).__name__ for module in callers.values()}))
        raise Refusal(
            f"{name}: dilated attention with one segment of all positions is not the attention of {kinds}, which masks "
            "or changes the scores in ways that it does not tell. Use another attn_implementation for this model."
        )
    return causal.pop()


def _past_ours(model: Any, callers: dict[str, nn.Module]) -> str | None:
    """The innermost module whose output changes at more positions than what it is given, with each position alone."""
    rows = next((getattr(module, SEEN) for module in callers.values()), ROWS)
    before, stirred = _trace(model, ALONE), None
    if model.main_input_name != "input_ids":
        layer = next((re.match(r".*?\d+(?=\.)", at) for at in callers), None)
        stirred = layer and layer[0]
    after = _trace(model, ALONE, stirred=stirred, other_token=True)

    def meet(x: Tensor | None, y: Tensor | None) -> bool:
        if x is None or y is None or x.dim() != 2 or x.shape[1] != rows or x.shape != y.shape:
            return False
        change_N = (x - y).abs().amax(0)
        return int((change_N > 1e-3 * change_N.max()).sum()) > 1

    for at, (given, output) in before.items():
        if meet(output, after[at][1]) and not meet(given, after[at][0]):
            return at
    return None


def _trace(
    model: Any, pattern: DilatedPattern | None, *, stirred: str | None = None, other_token: bool = False
) -> dict[str, tuple[Tensor | None, Tensor]]:
    """What each module is given first and returns first, summed over features, by its name, as modules end.

    Args:
        pattern: None for the model's own attention.
        stirred: the layer that is given something else at one position.
        other_token: the model is given another token at one position, if it takes tokens.
    """
    found: dict[str, tuple[Tensor | None, Tensor]] = {}

    def keep(at: str, module: nn.Module, args: tuple, options: dict, output: Any) -> None:
        result = _first(output)
        if result is not None and at not in found:
            found[at] = _first((args, options)), result

    def stir(module: nn.Module, args: tuple) -> None:
        args[0][:, args[0].shape[1] // 2] += 1

    _give(model.config, pattern)
    hooks = [module.register_forward_hook(partial(keep, at), with_kwargs=True) for at, module in model.named_modules()]
    if stirred is not None:
        hooks.append(model.get_submodule(stirred).register_forward_pre_hook(stir))
    model(**_inputs(model, other_token))
    for hook in hooks:
        hook.remove()
    return found


def _first(nested: Any) -> Tensor | None:
    """The first floating tensor of all, summed over features: that tells as well whether a position changed."""
    leaves = (x for x in tree_leaves(nested) if isinstance(x, Tensor) and x.is_floating_point() and x.dim())
    return next((x @ torch.arange(x.shape[-1]).cos().to(x) for x in leaves), None)


def _tiny(kind: type, config: Any) -> Any:
    """Fewer heads of the same width, and less of what NARROW names."""
    config = copy.deepcopy(config)
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 4:
        groups = getattr(config, "num_key_value_heads", None)
        config.hidden_size = 4 * (getattr(config, "head_dim", None) or hidden // heads)
        config.num_attention_heads = 4
        if groups:
            config.num_key_value_heads = 4 if groups == heads else min(groups, 2)
    for field, value in list(vars(config).items()):
        most = next((most for names, most in NARROW.items() if re.fullmatch(names, field)), None)
        if type(value) is int and (most is not None or field.endswith("_token_id")):
            setattr(config, field, value % 64 if most is None else min(value, most))
    _give(config, WHOLE)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > MOST:
        raise ValueError(f"it cannot be made small, and would have {size:,} parameters")
    model = kind(config).float().eval()
    model._apply(lambda x: torch.empty_like(x, device="cpu") if x.is_meta else x)  # accelerate's init_empty_weights
    torch.default_generator.manual_seed(0)  # not those of GPUs, which `fork_rng` does not keep
    for parameter in model.parameters():  # from_pretrained leaves them as memory was
        parameter.normal_(std=parameter[0].numel() ** -0.5) if parameter.dim() > 1 else parameter.uniform_(0.5, 1)
    return model


def _give(config: Any, pattern: DilatedPattern | None) -> None:
    config._attn_implementation = {"": NAME}
    setattr(config, FIELD, WHOLE if pattern is None else pattern)
    config._attn_implementation = "eager" if pattern is None else SEEN


def _inputs(model: Any, other_token: bool) -> dict[str, Tensor]:
    config, name = model.config, model.main_input_name
    if name == "input_ids":
        special = {value for field, value in vars(config).items() if field.endswith("_token_id")}
        ids = [x for x in range(config.vocab_size) if x not in special][-ROWS:]
        if other_token:
            ids[ROWS // 2] = ids[0]
        return {name: torch.tensor([ids])}
    side = getattr(config, "image_size", 32)
    sides = side if isinstance(side, (list, tuple)) else (side, side)
    shapes = {"pixel_values": (getattr(config, "num_channels", 3), *sides), "input_values": (4000,)}
    if name not in shapes:
        raise ValueError(f"its input is {name}, which is not known")
    return {name: torch.randn(1, *shapes[name], generator=torch.Generator().manual_seed(1))}

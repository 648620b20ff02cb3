"""Checks that dilated attention can replace a model's attention, by running a tiny copy of the transformers model.

The copy has the same layers as the model, but narrower. It is run in two ways.

1. With an attention in which each position attends only to itself. The input is changed at one position: a middle
   one, then the first, then the last. If the output changes at other positions too, something other than this
   attention mixes positions.
2. With dilated attention of one segment that holds all positions. The output must be the same as with the model's own
   attention.
"""

import copy
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from .attention_function import attend
from .config import ALONE, FIELD, NAME, SEEN, is_as_trained, pattern_of

# The number of positions in a copy's input, and the positions at which the input is changed.
ROWS, PLACES = 8, (4, 0, -1)
WHOLE = DilatedPattern.dense()
# The largest values of config fields in a copy. The keys are regular expressions for the fields' names. Smaller values
# make a copy narrower, but do not change its structure.
NARROW = {
    r"vocab_size|ffn_dim|d_ff|embedding_size|\w*intermediate_size": 64,
    r"(n|moe_num|num)_\w*experts": 32,
}
# The largest windows in a copy of a model that keeps its own attention. They are shorter than ROWS, so that windows
# have an effect.
WINDOWS = {r"\w*sliding_window|local_attention": 4}
MOST = 200_000_000  # the largest number of parameters of a copy; the copy of Qwen3-30B-A3B has 190 million
# Errors which tell that a copy does not run. (Some models run only with their own attention.)
FAILURES: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
)
FAILURES += (RuntimeError, TypeError, ValueError, StrictDataclassError)
Trace = dict[str, tuple[Tensor | None, Tensor]]  # by module name, the module's input and output


@cache
def watch_models() -> None:
    """From now on a model is checked when it is made or loaded: torch calls `_check_made` for each new submodule."""
    register_module_module_registration_hook(_check_made)


def _check_made(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Check a model when it gets its first child module: the model's class and config are known by then."""
    # Do not call isinstance, which may read attributes, because a module may have no attributes yet.
    if not issubclass(type(module), PreTrainedModel) or module._modules:
        return
    config = module.__dict__.get("config")
    asked = getattr(config, "_attn_implementation", None)
    if asked == NAME:
        check_model(type(module), module.config)
    elif getattr(config, FIELD, None) is not None and asked in ("sdpa", "eager"):
        # Refuse a model whose config has a pattern if the user or a larger model chose an attention other than NAME.
        raise ValueError(
            f"{type(module).__name__} would have attn_implementation={asked!r}, and its config has a pattern. Pass "
            f"attn_implementation={NAME!r} (or {{'text_config': {NAME!r}}} for that part of a larger model), or set "
            f"config.{FIELD} = None."
        )


def attend_seen(
    module: nn.Module, query_BHMD: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """Set the attribute SEEN of the calling module to the number of rows, then call `attend`. For tiny copies."""
    setattr(module, SEEN, query_BHMD.shape[2])
    return attend(module, query_BHMD, *args, **options)


def attend_alone(
    module: nn.Module, query_BHMD: Tensor, key: Tensor, value_BGMD: Tensor, *args: Any, **_: Any
) -> tuple[Tensor, None]:
    """An attention function by which each position attends only to itself. Tiny copies of a model run with it."""
    num_queries_each = query_BHMD.shape[1] // value_BGMD.shape[1]
    return value_BGMD.repeat_interleave(num_queries_each, 1).transpose(1, 2).contiguous(), None


def check_model(kind: type[PreTrainedModel], config: Any) -> bool:
    """Check the models of a class and config, once per process. Returns whether their attention is causal.

    Raises:
        ValueError: if dilated attention cannot replace the model's attention, with the reason. Also for a config with
            `attn_implementation="dilated"` and no valid pattern.
    """
    name, heads = kind.__name__, getattr(config, "num_attention_heads", None)
    if why := _why_another(config):
        raise ValueError(f"{name} {why}")
    if isinstance(heads, int) and not is_as_trained(config):
        pattern = pattern_of(config, is_causal=True)
        pattern.check_heads(heads, getattr(config, "num_key_value_heads", None) or heads)
    key = kind, repr(config.to_dict())  # repr, as JSON cannot encode all values of configs
    if key not in _causal:
        # If a class of transformers does not run by itself, run its base model instead. Do not do this for a user's own
        # class, which may compute something other than the base model.
        base = (
            MODEL_MAPPING.get(type(config), ())
            if kind.__module__.startswith("transformers.")
            else ()
        )
        with for_copies(name):
            _causal[key] = _check_copies(
                name, [kind, *(base if isinstance(base, tuple) else [base])], config
            )
    return _causal[key]


_causal: dict[tuple[type, str], bool] = {}


@contextmanager
def for_copies(name: str) -> Iterator[None]:
    """A context manager for making and running copies: on the CPU, in float32, without autocast and gradients.

    A user may make the model on the device "meta", with another default dtype or under autocast. The copy must not
    take over these settings. Copies leave torch's random generator on the CPU as it was.
    """
    with ExitStack() as stack:
        here = (
            torch.device("cpu"),
            local_torch_dtype(torch.float32, name),
            torch.autocast("cpu", enabled=False),
        )
        for context in (*here, torch.random.fork_rng(devices=[]), torch.no_grad()):
            stack.enter_context(context)
        if (zero := sys.modules.get("deepspeed.runtime.zero.partition_parameters")) is not None:
            zero.shutdown_init_context()  # otherwise ZeRO 3 divides the copy's parameters among ranks
            stack.callback(zero.restore_init_context)
        yield


def _why_another(config: Any) -> str | None:
    """Why this config excludes dilated attention, or None if it does not."""
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "adds ALiBi's biases to its scores: torch's kernels have none."
    inner = sorted(name for name in config.sub_configs if getattr(config, name, None) is not None)
    if inner:
        remedy = "convert the part that you mean."
        if is_as_trained(config):
            remedy = (
                "pass the text model inside, get_decoder(), or with a head and a loss AutoModelForCausalLM of "
                "config.text_config (docs/long_context.md)."
            )
        return f"is made of parts with configs of their own ({', '.join(inner)}): {remedy}"
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        return "attends across sequences, and dilated attention is self-attention."
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None:
        return f"has attn_logit_softcapping={cap}: torch's kernels do not cap scores."
    if "sliding_window" in (getattr(config, "per_layer_attributes", None) or ()):
        return "has windows in its per_layer_config, which its tiny copy does not show."
    types = getattr(config, "layer_types", None)
    others = set(types or ()) - {"full_attention"}
    if is_as_trained(config):
        others -= {"sliding_attention"}
        why = "full_attention and sliding_attention alone are computed over ranks."
    else:
        why = "dilated attention replaces full_attention alone."
        window = getattr(config, "sliding_window", None)
        if types is None and window is not None:
            remedy = "a sliding window is another pattern. Load the model with sliding_window=None."
            return f"has sliding_window={window}: {remedy}"
    return f"has layers of {', '.join(sorted(others))}: {why}" if others else None


class UnfitError(ValueError):
    """Raised if a small copy of the model runs, and its outputs show that dilated attention cannot replace the model's
    attention."""


def _check_copies(name: str, kinds: list[type], config: Any) -> bool:
    """Return the result of `_check_copy` for the first class in `kinds` whose copy runs.

    Raises ValueError if no copy runs.
    """
    first: Exception | None = None
    for kind in kinds:
        try:
            return _check_copy(name, tiny_copy(kind, config))
        except UnfitError:
            raise
        except FAILURES as error:
            first = first or error
    assert first is not None
    said = str(first)
    if type(first) is not ValueError:
        frames = [frame.f_locals.get("self") for frame, _ in walk_tb(first.__traceback__)]
        at = next(
            (type(module).__name__ for module in reversed(frames) if isinstance(module, nn.Module)),
            name,
        )
        said = f"{first!r} in {at}"
    raise ValueError(
        f"{name} does not run with dilated attention, as a tiny copy of it shows: {said}"
    ) from first


def _check_copy(name: str, model: Any) -> bool:
    whole, modules = _trace(model, SEEN), dict(model.named_modules())
    callers = {at: module for at, module in modules.items() if hasattr(module, SEEN)}
    other = _past_ours(model, callers)
    # `callers` are the modules that call our attention. Find an attention module that is no caller, contains no caller,
    # and lies inside no caller.
    if other is None:
        inside = tuple(f"{caller}." for caller in callers)
        named = [
            f"{at}." for at in whole if at and "attention" in type(modules[at]).__name__.lower()
        ]
        apart = [
            at
            for at in named
            if not at.startswith(inside) and not any(x.startswith(at) for x in inside)
        ]
        other = apart[-1][:-1] if apart else None
    if other is not None or not callers:
        where = f" in {type(modules[other]).__name__} ({other})" if other else ""
        raise UnfitError(
            f"{name}: positions are mixed{where} outside of dilated attention, so that the model would compute another "
            "function than its config says. Use a model that computes all attention through transformers' interface."
        )
    causal = {bool(getattr(module, "is_causal", True)) for module in callers.values()}
    if len(causal) > 1:
        raise UnfitError(
            f"{name} has attention modules that are causal and others that are not: convert its parts."
        )
    found, own = whole[""][1], _trace(model, "eager")[""][1]
    if not torch.allclose(found, own, rtol=1e-3, atol=1e-3 * float(own.abs().max())):
        kinds = ", ".join(sorted({type(module).__name__ for module in callers.values()}))
        ours = "dilated attention with one segment of all positions"
        if is_as_trained(model.config):
            ours = "attention by the windows and sinks that it passes"
        raise UnfitError(
            f"{name}: {ours} gives other results than {kinds}: the model masks or changes scores in a way that "
            "the arguments of its attention do not show. Use another attn_implementation for this model."
        )
    return causal.pop()


def _past_ours(model: Any, callers: dict[str, nn.Module]) -> str | None:
    """The name of the innermost module that mixes positions outside of our attention, or None.

    Such a module changes several rows of its output when one row of its input changes.
    """
    rows = next((getattr(module, SEEN) for module in callers.values()), ROWS)

    def meet(x: Tensor | None, y: Tensor | None) -> bool:
        if x is None or y is None or x.dim() != 2 or x.shape[1] != rows or x.shape != y.shape:
            return False
        change_N = (x - y).abs().amax(0)
        # Ignore changes below `rounding`, because otherwise experts of a large model would seem to mix positions.
        rounding = 1e-5 * y.abs().max()
        return int((change_N > (1e-3 * change_N.max()).clamp(min=rounding)).sum()) > 1

    before = _trace(model, ALONE)
    for after in (_trace(model, ALONE, place) for place in PLACES):
        for at, (given, output) in before.items():
            # Skip a module that did not run for the changed input (`after`). Experts run for some inputs only.
            if at in after and meet(output, after[at][1]) and not meet(given, after[at][0]):
                return at
    return None


def _trace(model: Any, attention: str, changed: int | None = None) -> Trace:
    """Run a copy. Returns, by each module's name, the module's first input tensor and first output tensor.

    Modules come in the order in which they finish.

    Args:
        attention: the name of an attention function in transformers' interface, such as SEEN.
        changed: the position at which the input is changed, or None to change nothing. If the model takes tokens, the
            token at this position is replaced. Otherwise the input of the first layer is changed.
    """
    found: Trace = {}

    def keep(at: str, module: nn.Module, args: tuple, options: dict, output: Any) -> None:
        if at not in found and (result := first_tensor(output)) is not None:
            found[at] = first_tensor((args, options)), result

    def change(module: nn.Module, args: tuple) -> None:
        args[0][:, args[0].shape[1] // 2 if changed == PLACES[0] else changed] += 1

    model.config._attn_implementation = attention
    modules = dict(model.named_modules())
    hooks = [
        module.register_forward_hook(partial(keep, at), with_kwargs=True)
        for at, module in modules.items()
    ]
    if changed is not None and model.main_input_name != "input_ids":
        layer = next(
            (
                re.match(r".*?\d+(?=\.)", at)
                for at, module in modules.items()
                if hasattr(module, SEEN)
            ),
            None,
        )
        hooks += [modules[layer[0]].register_forward_pre_hook(change)] if layer else []
    model(**inputs_of_copy(model, changed))
    for hook in hooks:
        hook.remove()
    return found


def first_tensor(nested: Any) -> Tensor | None:
    """The first floating tensor (..., E) in nested containers, summed over its E features; None if there is no tensor.

    Each feature has a different weight, so that a change of features at a position changes the sum at this position.
    """
    leaves = (
        x
        for x in tree_leaves(nested)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim()
    )
    return next((x @ torch.arange(x.shape[-1]).cos().to(x) for x in leaves), None)


def tiny_copy(kind: type, config: Any) -> Any:
    """A small model of this class, with random weights.

    The copy has at most 4 heads, with the model's head dim. NARROW limits other sizes.
    """
    config = copy.deepcopy(config)
    heads, hidden = (
        getattr(config, "num_attention_heads", None),
        getattr(config, "hidden_size", None),
    )
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 4:
        groups = getattr(config, "num_key_value_heads", None)
        config.hidden_size = 4 * (getattr(config, "head_dim", None) or hidden // heads)
        config.num_attention_heads = 4
        if groups:
            config.num_key_value_heads = 4 if groups == heads else min(groups, 2)
    narrow = {**NARROW, **WINDOWS} if is_as_trained(config) else NARROW
    for field, value in list(vars(config).items()):
        most = next((most for names, most in narrow.items() if re.fullmatch(names, field)), None)
        if type(value) is int and (most is not None or field.endswith("_token_id")):
            setattr(config, field, value % 64 if most is None else min(value, most))
    if not is_as_trained(config):
        config._attn_implementation = {"": NAME}
        setattr(config, FIELD, WHOLE)
    config._attn_implementation = SEEN
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > MOST:
        raise ValueError(
            f"no small copy of the model can be made for the check: it would have {size:,} parameters"
        )
    model = kind(config).float().eval()
    # Move parameters from "meta" to the CPU: accelerate's init_empty_weights makes parameters on "meta".
    model._apply(lambda x: torch.empty_like(x, device="cpu") if x.is_meta else x)
    # Seed only the CPU's random generator, because `for_copies` does not restore the generators of GPUs.
    torch.default_generator.manual_seed(0)
    # Set all parameters, because inside from_pretrained a new model's parameters have no values yet.
    for parameter in model.parameters():
        parameter.normal_(
            std=parameter[0].numel() ** -0.5
        ) if parameter.dim() > 1 else parameter.uniform_(0.5, 1)
    return model


def inputs_of_copy(model: Any, changed: int | None) -> dict[str, Tensor]:
    config, name = model.config, model.main_input_name
    if name == "input_ids":
        special = {value for field, value in vars(config).items() if field.endswith("_token_id")}
        ids = ([x for x in range(config.vocab_size) if x not in special] * ROWS)[-ROWS:]
        if changed is not None:
            # Take the token of the neighbouring position: the two tokens differ even in the smallest vocabulary.
            ids[changed] = ids[changed ^ 1]
        return {name: torch.tensor([ids])}
    side = getattr(config, "image_size", 32)
    sides = side if isinstance(side, (list, tuple)) else (side, side)
    shapes = {"pixel_values": (getattr(config, "num_channels", 3), *sides), "input_values": (4000,)}
    if name not in shapes:
        raise ValueError(f"its input is {name}, of which the check can make no example")
    return {name: torch.randn(1, *shapes[name], generator=torch.Generator().manual_seed(1))}

"""Functions and modules on one device: right calls against the definition in float64, wrong ones against a ValueError.

What must hold: every result and gradient within a bound of the definition, inputs left as they were; a call
under `torch.autocast` is, to the bit, that of inputs which were cast by hand, and float64 stays float64; and what
cannot be is refused with a ValueError that says something.
Uninitialised memory is NaN.
"""

import functools
import math
from types import FunctionType

import torch
from fuzz import Trial, broken, nothing
from fuzz_modules import MODULE_BREAKAGES, try_module
from fuzz_oracle import (
    NAMES,
    STRIDES,
    Answer,
    answer_to,
    borders_of,
    difference,
    draw_call,
    draw_heads,
    tensors_of,
)
from helpers import poisoned_memory
from torch.utils.checkpoint import checkpoint

from ring_dilated_attention import (
    ContextParallel,
    DilatedPattern,
    dilated_attention,
    save_attention,
)
from ring_dilated_attention.attention import attention, validate
from ring_dilated_attention.kernels import cpu

WIDE = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]


def try_case(rng, folder):
    kinds = {try_call: 12, try_autocast: 4, try_module: 7, try_hostile: 3}
    with poisoned_memory():
        return rng.choices([*kinds], [*kinds.values()])[0](rng)


def try_call(rng):
    how = rng.choice(["plain", "plain", "checkpointed", "twice", "some heads"])
    call = draw_call(rng, sinks=how != "some heads")
    inputs, dout, dlse = tensors_of(call)
    answer = answer_to(call, inputs, dout, dlse)
    attend = functools.partial(dilated_attention, **call.rules)
    if how == "some heads":
        heads, own = draw_heads(rng, call)
        held = {"heads_held": range(heads.start, heads.stop), "num_heads": call.num_heads}
        attend = functools.partial(attend, **held)
        inputs = [inputs[0][:, :, heads], *(x[:, :, own] for x in inputs[1:])]
        dout, dlse = dout[:, :, heads], dlse[:, :, heads]
        of = {name: own if name in ("dk", "dv") else heads for name in NAMES}
        answer = Answer(*({name: x[name][:, :, of[name]] for name in NAMES} for x in answer))
    leaves = arranged(rng, call, inputs)
    before = [x.detach().clone() for x in leaves]
    found = results(call, leaves, attend, dout, dlse, how)
    complaint = difference(call, found, answer)
    if not all(map(torch.equal, before, leaves)):
        complaint = "the inputs were changed"
    return Trial(f"call, {call.dtype}, {how}", str(call), complaint)


def try_autocast(rng):
    """Floating types but float64 take autocast's, as by torch's own attention. Gradients have the inputs' own types."""
    short = rng.choice([torch.bfloat16, torch.float16])
    given = [rng.choice(WIDE)] * 3 if rng.random() < 0.8 else rng.choices(WIDE, k=3)
    casts = {x if x == torch.float64 else short for x in given}
    call = draw_call(rng, dtypes=[*casts])
    inputs, dout, dlse = tensors_of(call)
    leaves = arranged(rng, call, [x.to(dtype) for x, dtype in zip(inputs, given, strict=True)])
    how = rng.choice(["plain", "checkpointed", "twice"])
    attend = alone = functools.partial(dilated_attention, **call.rules)
    if len(set(given)) == 1 and rng.random() < 0.03:  # it notices where autocast begins
        how = "compiled"
        torch._dynamo.reset()
        attend = torch.compile(alone, fullgraph=True, backend=rng.choice(["eager", "aot_eager"]))
        attend(*leaves)

    def under_autocast(*inputs, **more):
        with torch.autocast("cpu", short):
            return attend(*inputs, **more)

    description = f"{call} from {given} under {short}"
    if len(casts) > 1:
        complaint = why_not_refused(lambda: under_autocast(*leaves))
        return Trial("autocast, refused", description, complaint)
    by_casts = [x.detach().to(call.dtype).requires_grad_(x.requires_grad) for x in leaves]
    with torch.autocast("cpu", short, enabled=rng.random() < 0.5):  # for the backward
        found = results(call, leaves, under_autocast, dout, dlse, how)
    complaint = None
    own_types = dict(zip(("dq", "dk", "dv"), given, strict=True))
    for name, right in results(call, by_casts, alone, dout, dlse).items():
        right = right.to(own_types.get(name, right.dtype))
        # a compiled backward may add in another order
        eps = 4 * torch.finfo(right.dtype).eps if how == "compiled" else 0.0
        most = eps * max(1.0, right.nan_to_num(0, 0, 0).abs().max().item())
        if found[name].dtype != right.dtype or not torch.allclose(found[name], right, eps, most):
            complaint = f"{name} is {found[name]} and should be {right}"
    return Trial(f"autocast, {how}, {call.dtype}", description, complaint)


def arranged(rng, call, inputs):
    """The inputs with any strides; those that need a gradient want one."""
    leaves = [rng.choice(STRIDES)(x).detach() for x in inputs]
    return [
        x.requires_grad_(name in call.needs_grad) for name, x in zip("qkv", leaves, strict=True)
    ]


def results(call, leaves, attend, dout, dlse, how="plain"):
    """out, lse and the gradients that are wanted, by name."""
    wanted = {f"d{name}": x for name, x in zip("qkv", leaves, strict=True) if x.requires_grad}
    more = {"return_lse": True}
    if (sinks := call.sinks) is not None:
        wanted["dsinks"] = more["sinks"] = sinks
    attend = functools.partial(attend, **more)
    if how == "twice":
        attend(*leaves)  # nothing of it is used
    if how == "checkpointed":
        out, lse = checkpoint(attend, *leaves, use_reentrant=False, context_fn=save_attention)
    else:
        out, lse = attend(*leaves)
    found = {"out": out, "lse": lse}
    if not call.needs_grad:
        return found
    roots, douts = {"both": ([out, lse], [dout, dlse]), "out": (out, dout), "lse": (lse, dlse)}[
        call.outputs
    ]
    grads = torch.autograd.grad(roots, [*wanted.values()], douts, materialize_grads=True)
    return found | dict(zip(wanted, grads, strict=True))


# What cannot be, by the argument that is spoilt: of `dilated_attention`, given right ones. `test_messages.py` has more.
def borders(*numbers):
    """cu_seqlens of these and the length of the sequence."""
    return lambda a: borders_of((*numbers, a["query"].shape[1]))


HOSTILE = {
    "query": [
        lambda a: a["query"].tolist(),
        lambda a: a["query"][0],
        lambda a: a["query"].to(torch.complex64),
        lambda a: a["query"][..., :0],
        lambda a: torch.cat([a["query"], a["query"]], dim=1),
        lambda a: a["query"].to("meta"),
        lambda a: a["query"].to(torch.float8_e4m3fn),
    ],
    "key": [
        lambda a: a["key"][:, :, :0],
        lambda a: a["key"].to_sparse(),
        lambda a: a["key"].float() if a["key"].dtype == torch.float64 else a["key"].double(),
        object(),
    ],
    "value": [lambda a: a["value"][:, :-1], lambda a: a["value"][..., :0], 1.0],
    "pattern": [None, DilatedPattern],
    "parallel": [2, ContextParallel],
    "cu_seqlens": [
        lambda a: [0, a["query"].shape[1]],
        torch.tensor([], dtype=torch.int32),
        torch.tensor(0, dtype=torch.int32),
        lambda a: borders(0)(a).to("meta"),
        borders(1),
        borders(0, -3),
        lambda a: borders(0)(a)[None],
    ],
    "scale": [math.nan, 10**400, "1", True, 1j, torch.tensor(1.0), [1.0]],
    "backend": [None, "sdpa", ["cpu"]],
    "heads_held": [range(0), 3, lambda a: range(a["query"].shape[2]), [0], slice(0, 1)],
    "num_heads": [7, True, "4", 0],
}


def hostile(name, number, arguments):
    value = HOSTILE[name][number]
    return value(arguments) if isinstance(value, FunctionType) else value


def try_hostile(rng):
    """What cannot be is a ValueError, and says something: a right call with one argument that is not."""
    call = draw_call(rng)
    name = rng.choice(list(HOSTILE))
    number = rng.randrange(len(HOSTILE[name]))
    arguments = dict(zip(("query", "key", "value"), tensors_of(call)[0], strict=True)) | call.rules
    if name == "cu_seqlens" and rng.random() < 0.8:
        arguments |= {k: arguments[k][:1] for k in ("query", "key", "value")}
    arguments[name] = hostile(name, number, arguments)
    complaint = why_not_refused(lambda: dilated_attention(**arguments))
    return Trial(f"refused: {name}", f"{name} {number} of {call}", complaint)


def why_not_refused(attempt):
    try:
        attempt()
    except ValueError as error:
        return None if len(str(error)) > 10 else f"it says too little: {error}"
    except Exception as error:  # noqa: BLE001  whatever it is, it is not what a user can be told
        return f"{type(error).__name__} where a ValueError belongs: {error}"
    return "it is taken"


_autocast, _forward = attention.autocast, cpu.forward
_with_columns = cpu.with_dlse_columns


def _forward_without_causality(q, k, v, is_causal, scale):
    return _forward(q, k, v, False, scale)


def _dlse_of_float16(rows):
    if rows.dlse is not None:
        rows = rows._replace(dlse=rows.dlse.half().to(rows.dlse.dtype))
    return _with_columns(rows)


def _cast_float64_too(x):
    is_wide = isinstance(x, torch.Tensor) and x.dtype == torch.float64
    if is_wide and torch.is_autocast_enabled("cpu"):
        return x.to(torch.get_autocast_dtype("cpu"))
    return _autocast(x)


CALL_BREAKAGES = {
    "causality is forgotten": broken("forward", _forward_without_causality, cpu),
    "dlse goes through float16": broken("with_dlse_columns", _dlse_of_float16, cpu),
}
BREAKAGES = {
    **CALL_BREAKAGES,
    "float64 is cast": broken("autocast", _cast_float64_too, attention),
    "scales are not checked": broken("_check_scale", nothing, validate),
    **MODULE_BREAKAGES,
}

"""Calls, modules, caches and models under `torch.autocast` on one CPU: the same function, in the promised dtype.

As torch's own attention: floating types but float64 take autocast's, lse stays float32, gradients have the types of
the inputs.

What must hold: a call is that of inputs which were cast by hand, to the bit, and within the bound of the definition; a
module is that of casts by hand; float64 is as if there were no autocast, to the bit; recomputing changes nothing; a
cache made under autocast takes what calls there are given; compiled code notices where autocast begins and ends.
"""

import contextlib
import copy
import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
from fuzz import Trial, broken
from fuzz_calls import arranged, results, why_not_refused
from fuzz_modules import by_hand, draw_module
from fuzz_oracle import (
    NAMES,
    answer_to,
    borders_of,
    difference,
    draw_call,
    sizes_of_terms,
    tensors_of,
    why_off,
)
from helpers import poisoned_memory
from padded import padded_branches, padded_reference
from torch import Tensor

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.attention import attention
from ring_dilated_attention.layers import multihead
from ring_dilated_attention.models import LongNetConfig, LongNetLM, torchscale_attention
from ring_dilated_attention.models.torchscale import gate as gates
from ring_dilated_attention.reference import multiplicity

WIDE = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHORT = [torch.bfloat16, torch.bfloat16, torch.float16]


def try_case(rng, folder):
    kinds = [try_call, try_mixed, try_module, try_cache, try_model, try_gated, try_compiled]
    torch.manual_seed(rng.randrange(2**31))
    with poisoned_memory():
        return rng.choices(kinds, [10, 3, 5, 3, 4, 3, 0.3])[0](rng)


@contextlib.contextmanager
def under(dtype, is_off=False):
    off = torch.autocast("cpu", enabled=False) if is_off else contextlib.nullcontext()
    with torch.autocast("cpu", dtype), off:
        yield


def taken(given, short):
    """The type that autocast makes of a type."""
    return given if given == torch.float64 else short


def names(dtype):
    return str(dtype).removeprefix("torch.")


def try_call(rng):
    """One type of inputs, or several that autocast makes one; backward inside or outside."""
    given, short = rng.choice(WIDE), rng.choice(SHORT)
    how = rng.choice(["plain", "plain", "checkpointed", "twice"])
    is_off, is_inside = rng.random() < 0.1, rng.random() < 0.5
    dtype = given if is_off else taken(given, short)
    call = draw_call(rng, dtypes=[dtype])
    inputs, dout, dlse = tensors_of(call)
    leaves = arranged(rng, call, [x.to(given) for x in inputs])
    attend = functools.partial(dilated_attention, **call.rules)

    def cast_here(*given, **more):
        with under(short, is_off):
            return attend(*given, **more)

    if is_inside:
        with under(short, is_off):
            found = results(call, leaves, attend, dout, dlse, how)
    else:
        found = results(call, leaves, cast_here, dout, dlse, how)
    by_casts = [x.detach().to(dtype).requires_grad_(x.requires_grad) for x in leaves]
    right = results(call, by_casts, attend, dout, dlse)
    complaint = None
    for name, x in found.items():
        wanted = given if name.startswith("d") else right[name].dtype
        complaint = complaint or why_another(name, x, right[name].to(wanted))
    complaint = complaint or difference(call, right, answer_to(call, inputs, dout, dlse))
    where = "off" if is_off else f"{names(given)} to {names(dtype)}"
    description = f"{call} from {given} under {short}, {how}, inside: {is_inside}"
    return Trial(f"call, {where}", description, complaint)


def try_mixed(rng):
    """Inputs of several types: one that all can be, or refused, as without autocast."""
    short = rng.choice(SHORT)
    dtypes = [rng.choice(WIDE) for _ in range(3)]
    call = draw_call(rng, dtypes=[torch.float32])._replace(needs_grad="")
    inputs = [x.to(dtype) for x, dtype in zip(tensors_of(call)[0], dtypes, strict=True)]
    attend = functools.partial(dilated_attention, **call.rules)
    kinds = {taken(dtype, short) for dtype in dtypes}
    description = f"{call} of {dtypes} under {short}"

    def attempt():
        with under(short):
            return attend(*inputs)

    if len(kinds) > 1:
        return Trial("mixed, refused", description, why_not_refused(attempt))
    [dtype] = kinds
    complaint = why_another("out", attempt(), attend(*(x.to(dtype) for x in inputs)))
    return Trial("mixed, computed", description, complaint)


def why_another(name, found, right):
    """What is wrong with a result that should be another to the bit, or None."""
    if found.dtype != right.dtype:
        return f"{name} is {found.dtype}, not {right.dtype}"
    return None if torch.equal(found, right) else f"{name} is not that of the other call"


def why_far(name, found, expected, dtype, tolerance, size=None):
    """In the L2 norm, relative to `size`: by default that of `expected`, which then is nothing that may cancel."""
    if found.dtype != dtype or found.shape != expected.shape:
        return f"{name} is {found.dtype} {tuple(found.shape)}, not {dtype} {tuple(expected.shape)}"
    found, expected = found.detach().double(), expected.detach().double()
    error = float((found - expected).norm())
    if size is None:
        size = float(expected.norm())
    allowed = tolerance * size + 1e-6
    # NaN is not below it
    return None if error <= allowed else f"{name} is off by {error:.1e}: {allowed:.1e} is allowed"


def why_gradients_far(module, found, expected, tolerance):
    """Relative to the largest of them: a bias of keys has no gradient but for rounding, of the size of the others."""
    largest = max(float(y.norm()) for y in expected)
    for (name, weight), x, y in zip(module.named_parameters(), found, expected, strict=True):
        if complaint := why_far(f"gradient of {name}", x, y, weight.dtype, tolerance, largest):
            return complaint
    return None


def attend_in_documents(query, key, value, pattern, cu_seqlens):
    borders = borders_of(cu_seqlens)
    return dilated_attention(query, key, value, pattern, cu_seqlens=borders, return_lse=True)


def try_module(rng):
    module = draw_module(rng).to(rng.choice([torch.float32, torch.float32, torch.float64]))
    given, short = module.in_proj_weight.dtype, rng.choice(SHORT)
    dtype = taken(given, short)
    batch, num_positions = rng.randint(1, 3), rng.randint(1, 40)
    x = torch.randn(batch, num_positions, module.embed_dim, dtype=given)
    documents, more = None, {}
    how = rng.choice(["plain", "packed", "padded"])
    if how == "packed":
        x, documents = x[:1], (0, num_positions)
        if num_positions > 1:
            documents = (0, rng.randint(1, num_positions - 1), num_positions)
        more["cu_seqlens"] = borders_of(documents)
    elif how == "padded":  # by nothing, which takes the same way
        more["key_padding_mask"] = torch.zeros(batch, num_positions, dtype=torch.bool)
    with under(short):
        found = module(x, x, x, **more)[0]
    expected = by_hand(module, x, documents, attend=attend_in_documents, dtype=dtype)
    eps = torch.finfo(dtype).eps
    # The last rounding may fall otherwise, where rotations were rounded once more, and a norm passes it on.
    complaint = why_far("out", found, expected, dtype, 8 * eps)
    dout = torch.randn_like(found)
    grads = [torch.autograd.grad(y, [*module.parameters()], dout) for y in (found, expected)]
    complaint = complaint or why_gradients_far(module, *grads, 32 * eps)
    description = f"{module}, {tuple(x.shape)} under {short}"
    return Trial(f"module, {how}, {names(given)}", description, complaint)


def try_cache(rng):
    """A cache of a module that was made under autocast, and one that was not."""
    module = draw_module(rng).float()
    lengths = [min(w, 1000) for w in module.pattern.segment_lengths]
    window = module.pattern.window and min(module.pattern.window, 1000)
    module.pattern = replace(module.pattern, segment_lengths=lengths, window=window, is_causal=True)
    short, batch, num_positions = rng.choice(SHORT), rng.randint(1, 3), rng.randint(1, 30)
    x = torch.randn(batch, num_positions, module.embed_dim)
    is_refused = rng.random() < 0.2
    with torch.no_grad():
        other = module.make_cache(batch)
        with under(short):
            cache = module.make_cache(batch)
            expected = module(x, x, x)[0]
            if is_refused:
                complaint = why_not_refused(lambda: module(x, x, x, cache=other))
                return Trial("cache, refused", f"{module} under {short}", complaint)
            outs, start = [], 0
            while start < num_positions:
                rows = x[:, start : start + rng.choice([1, 1, 4, 11])]
                outs.append(module(rows, rows, rows, cache=cache)[0])
                start += rows.shape[1]
    complaint = None if cache.dtype == short else f"the cache is {cache.dtype}"
    tolerance = 16 * torch.finfo(short).eps
    complaint = complaint or why_far("out", torch.cat(outs, 1), expected, short, tolerance)
    return Trial("cache, computed", f"{module}, {tuple(x.shape)} under {short}", complaint)


def try_model(rng):
    """A language model's loss and gradients are near those in float64, and recomputing changes no bit of them."""
    short = rng.choice([torch.bfloat16, torch.float16])
    lengths, rates = [rng.choice([4, 7, 16]), 64], [1, rng.choice([1, 2, 3])]
    # wide enough that its norms do not blow rounding up
    config = LongNetConfig(lengths, rates, vocab_size=13, num_layers=2, embed_dim=32, num_heads=4)
    tokens = torch.randint(13, (rng.randint(1, 2), rng.randint(2, 40)))
    model = LongNetLM(config)
    recomputed = LongNetLM(config, activation_checkpointing=True)
    recomputed.load_state_dict(model.state_dict())
    exact = copy.deepcopy(model).double()
    losses, grads = [], []
    for one in (model, recomputed, exact):
        with under(short, is_off=one is exact):
            losses.append(one.loss(tokens))
        grads.append(torch.autograd.grad(losses[-1], [*one.parameters()]))
    tolerance = 12 * torch.finfo(short).eps
    complaint = why_far("loss", losses[0], losses[2], torch.float32, tolerance)
    complaint = complaint or why_gradients_far(model, grads[0], grads[2], 4 * tolerance)
    for x, y in zip(*grads[:2], strict=True):
        complaint = complaint or why_another("a gradient of recomputing", y, x)
    return Trial("language model", f"{config}, {tuple(tokens.shape)} under {short}", complaint)


def sizes_of_gated(inputs, pattern, dout, lse):
    """`sizes_of` over padded rows, branch by branch. Keys of padding are zero: they count in lse alone."""
    length, num_heads, head_dim = inputs[0].shape[1:]
    total = {name: torch.zeros_like(dout) for name in NAMES} | {"lse": torch.zeros_like(lse)}
    for rows_P, is_row_P, one in padded_branches(pattern, length):
        cropped = len(rows_P) - length  # places beyond the sequence, which are no result
        padded = [x[:, rows_P] * is_row_P[:, None, None] for x in inputs]
        dout_P = F.pad(dout, (0, 0, 0, 0, 0, cropped))
        lse_P = F.pad(lse, (0, 0, 0, cropped), value=torch.inf)
        count, dlse_P = multiplicity(one, len(rows_P), num_heads), torch.zeros_like(lse_P)
        sizes = sizes_of_terms(count, head_dim**-0.5, padded, dout_P, dlse_P, lse_P)
        for name in ("out", "lse"):
            total[name] += sizes[name][:, :length]
        for name in ("dq", "dk", "dv"):
            total[name].index_add_(1, rows_P[is_row_P], sizes[name][:, is_row_P])
    return total


def try_gated(rng):
    """torchscale's attention, zero rows and misplaced ones included, against the definition over padded rows."""
    num_heads, seq_len, short = rng.randint(1, 5), rng.randint(1, 40), rng.choice(SHORT)
    branches = [(rng.randint(1, 30), rng.randint(1, 7)) for _ in range(rng.randint(1, 3))]
    is_causal = rng.random() < 0.3
    pattern = DilatedPattern(*zip(*branches, strict=True), is_causal=is_causal, phase="blocked")
    inputs = [torch.randn(2, seq_len, num_heads, 8) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    with under(short):
        out, lse = torchscale_attention(*leaves, pattern, return_lse=True)
    exact = [x.to(short).double().requires_grad_() for x in inputs]
    expected, right_lse = padded_reference(*exact, pattern)
    dout = torch.randn_like(out)
    values = [expected.detach(), right_lse.detach()]
    values += torch.autograd.grad((expected * dout).sum(), exact)
    results_here = [out, lse, *torch.autograd.grad((out * dout).sum(), leaves)]
    sizes = sizes_of_gated([x.detach() for x in exact], pattern, dout.double(), values[1])
    complaint = None
    for name, actual, value in zip(NAMES, results_here, values, strict=True):
        dtype = short if name == "out" else torch.float32
        complaint = complaint or why_off(name, actual, value, sizes[name], dtype, short)
    kind = "gated, causal" if is_causal else "gated, not causal"
    return Trial(kind, f"{pattern}, {out.shape} under {short}", complaint)


def try_compiled(rng):
    """A compiled call that is made under autocast and without, by turns; a module's too."""
    call = draw_call(rng, dtypes=[torch.float32])._replace(needs_grad="qkv", outputs="both")
    inputs, dout, dlse = tensors_of(call)
    short = rng.choice(SHORT)
    attend = functools.partial(dilated_attention, **call.rules)
    complaint = None
    try:
        compiled = torch.compile(attend, fullgraph=True, backend=rng.choice(["eager", "aot_eager"]))
        for is_on in rng.choice([(True, False), (False, True)]):
            leaves = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
            with under(short) if is_on else contextlib.nullcontext():
                found = results(call, leaves[0], compiled, dout, dlse)
                right = results(call, leaves[1], attend, dout, dlse)
            for name in NAMES:
                complaint = complaint or why_another(name, found[name], right[name])
    finally:
        torch._dynamo.reset()
    return Trial("compiled call", f"{call} under {short}", complaint)


def _cast_float64_too(x):
    is_wide = (
        isinstance(x, Tensor) and x.dtype == torch.float64 and torch.is_autocast_enabled("cpu")
    )
    return x.to(torch.get_autocast_dtype("cpu")) if is_wide else _autocast(x)


_autocast = attention.autocast


def _ungated(out, lse, _):
    return out, lse


BREAKAGES = {
    "float64 is cast": broken("autocast", _cast_float64_too, attention),
    "a cache has the parameters' type": broken("autocast", lambda x: x, multihead),
    "zero rows are not counted": broken("with_sinks", _ungated, gates),
}

"""Random modules against the same put together by hand: projections, rotary angles, the definition, the output. Under
autocast too, with its casts.

B batch, N positions, E embedding, H query heads, G key/value heads, D head dim.
"""

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from fuzz import Trial, broken
from fuzz_oracle import borders_of, draw_pattern

from ring_dilated_attention import MultiheadDilatedAttention, dilated_attention
from ring_dilated_attention.layers import multihead, padded
from ring_dilated_attention.reference import dilated_attention_reference

# Numbers are near 1, and sums have some hundred terms. In 16 bits the last rounding may fall otherwise, where rotations
# were rounded once more, and a norm passes it on.
TOLERANCE = {torch.float64: 1e-10, torch.bfloat16: 8 * 2**-7, torch.float16: 8 * 2**-10}


def draw_module(rng):
    num_kv_heads = rng.randint(1, 3)
    num_heads = num_kv_heads * rng.randint(1, 2)
    torch.manual_seed(rng.randrange(2**31))
    module = MultiheadDilatedAttention(
        num_heads * rng.choice([2, 4, 8]),
        num_heads,
        draw_pattern(rng, num_heads),
        num_kv_heads=num_kv_heads,
        bias=rng.random() < 0.7,
        sub_layernorm=rng.random() < 0.5,
        rotary=rng.choice([False, True, 77.0]),
        dtype=torch.float64,
    )
    for parameter in module.parameters():  # biases and norms that say something
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def by_hand(module, x_BNE, documents=None, positions=None, dtype=torch.float64):
    """What the module's docstring says, from its parameters, with the casts that autocast makes to a type."""
    if positions is None:
        borders = documents or (0, x_BNE.shape[1])
        positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(borders)])
    dim = module.head_dim
    widths = (module.num_heads * dim, module.num_kv_heads * dim, module.num_kv_heads * dim)
    joined = linear(x_BNE, module.in_proj_weight, module.in_proj_bias, dtype)
    heads = [x.unflatten(-1, (-1, dim)) for x in joined.split(widths, dim=-1)]
    if module.rotary_base is not None:
        angles = positions.double()[:, None] * module.rotary_base ** (
            -torch.arange(0, dim, 2).double() / dim
        )
        heads[:2] = [turned(x.double(), angles).to(dtype) for x in heads[:2]]
    if dtype == torch.float64:
        out, _ = dilated_attention_reference(*heads, module.pattern, cu_seqlens=documents)
    else:  # which other cases compare with the definition
        out = dilated_attention(*heads, module.pattern, cu_seqlens=borders_of(documents))
    out = out.flatten(2)
    if module.sub_layernorm is not None:
        norm = module.sub_layernorm
        wide = out.to(norm.weight.dtype)
        out = F.layer_norm(wide, out.shape[-1:], norm.weight, norm.bias, norm.eps)
    return linear(out, module.out_proj.weight, module.out_proj.bias, dtype)


def linear(x, weight, bias, dtype):
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def turned(x, angles_ND):
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles_ND.cos()[:, None], angles_ND.sin()[:, None]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def try_module(rng):
    module = draw_module(rng)
    short = rng.choice([None, None, torch.bfloat16, torch.float16])
    if short is not None:
        module.to(rng.choice([torch.float32, torch.float32, torch.float64]))
    given = module.in_proj_weight.dtype
    dtype = short if given == torch.float32 else torch.float64
    batch, num_positions = rng.randint(1, 3), rng.randint(1, 40)
    hows = ["plain", "padded", "packed", "positions", "three inputs", "cached", "cached"]
    how = rng.choice(hows)
    x = torch.randn(batch, num_positions, module.embed_dim, dtype=given)
    documents, positions, more = None, None, {}
    if how == "packed":
        x, inner = x[:1], {rng.randint(1, num_positions) for _ in range(3)} - {num_positions}
        documents = (0, *sorted(inner), num_positions)
        more["cu_seqlens"] = borders_of(documents)
    if how == "positions" and module.rotary_base is not None:
        positions = torch.tensor([rng.randrange(10**6) for _ in range(num_positions)])
        more["positions"] = positions
    if how == "padded":
        lengths = [rng.randint(0, num_positions) for _ in range(batch)]
        lengths[0] = max(lengths[0], 1)  # a mask that is True everywhere is refused
        mask = torch.arange(num_positions) >= torch.tensor(lengths)[:, None]
        x = x.masked_fill(mask[..., None], torch.nan)  # which must not be read
        more["key_padding_mask"] = mask
    x.requires_grad_()
    if how == "cached":
        module.pattern = replace(module.pattern, is_causal=True)
    if how == "padded":
        several = [padded_by_hand(module, x[b : b + 1], n, dtype) for b, n in enumerate(lengths)]
        expected = torch.cat(several)
    else:
        expected = by_hand(module, x, documents, positions, dtype)
    inputs = [x.clone() for _ in range(3)] if how == "three inputs" else [x] * 3
    with torch.autocast("cpu", short or torch.bfloat16, enabled=short is not None):
        if how == "cached":
            found = by_a_cache(module, x, rng.choice([1, 4, 11]))
        else:
            found, _ = module(*inputs, **more)
    complaint = why_unequal("out", found, expected)
    if dtype == torch.float64 and how != "cached":
        complaint = complaint or why_gradients_unequal(module, x, found, expected)
    description = f"{module}, {tuple(x.shape)} under {short}, {more}"
    return Trial(f"module, {how}, {dtype}", description, complaint)


def padded_by_hand(module, x_1NE, length, dtype):
    """The valid positions alone; padded ones come out as zeros (or what the norm makes of none) before out_proj."""
    rest = torch.zeros(1, x_1NE.shape[1] - length, module.embed_dim)
    outs = [linear(rest, module.out_proj.weight, module.out_proj.bias, dtype)]
    if length:
        outs.insert(0, by_hand(module, x_1NE[:, :length], dtype=dtype))
    return torch.cat(outs, dim=1)


def by_a_cache(module, x, num_rows):
    cache = module.make_cache(x.shape[0], max_len=x.shape[1])
    with torch.no_grad():
        outs = [module(rows, rows, rows, cache=cache)[0] for rows in x.split(num_rows, dim=1)]
    return torch.cat(outs, dim=1)


def why_unequal(name, found, expected):
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{name} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    tolerance = TOLERANCE[found.dtype]
    found, expected = found.detach().double(), expected.detach().double()
    size = float(expected.abs().max()) + 1 if expected.numel() else 1.0
    error = float((found - expected).abs().max()) if found.numel() else 0.0
    return (
        None
        if error <= tolerance * size
        else f"{name} is off by {error:.1e}, where numbers are up to {size:.1e}"
    )


def why_gradients_unequal(module, x, found, expected):
    """Of all parameters and the input, for a random gradient of the output."""
    names, leaves = zip(*module.named_parameters(), ("the input", x), strict=True)
    dout = torch.randn_like(expected)
    grads = [
        torch.autograd.grad(y, leaves, dout, materialize_grads=True) for y in (found, expected)
    ]
    for name, actual, right in zip(names, *grads, strict=True):
        if complaint := why_unequal(f"gradient of {name}", actual, right):
            return complaint
    return None


_lengths = padded.valid_lengths


def _all_valid(mask, batch, num_positions):
    return torch.full_like(_lengths(mask, batch, num_positions), num_positions)


MODULE_BREAKAGES = {
    "padding is attended": broken("valid_lengths", _all_valid, padded),
    "a cache has the parameters' type": broken("autocast", lambda x: x, multihead),
}

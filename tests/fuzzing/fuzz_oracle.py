"""Random calls of `dilated_attention`, the definition's answer in float64, and how far from it an answer may be.

B batch, N positions, H query heads, G key/value heads, D head dim.

The bound is elementwise: an entry may be off by BOUND times the dtype's eps times the sum of the *absolute values* that
it is made of. (A difference to a sum that nearly cancels says little where it is relative to the sum.)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.reference import dilated_attention_reference, multiplicity

DTYPES = [torch.float64] * 6 + [torch.float32] * 2 + [torch.bfloat16, torch.float16]
# Sums here have below 1,000 terms, which torch adds in blocks. 16-bit kernels round the weights and out as well.
BOUND = 24.0
LARGEST = 60_000.0  # float16 ends at 65,504; beyond this the true number may round to infinity
# Queries times a scale of 1e-40 are subnormal, and hold a few bits. What is that small may be anything that small.
SMALLEST = {torch.float64: 0.0, torch.float32: 1e-32, torch.bfloat16: 1e-32, torch.float16: 0.0}
STRIDES = [
    lambda x: x,
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    lambda x: torch.cat([x + 1, x], dim=2)[:, :, x.shape[2] :],
    lambda x: torch.cat([x[:, :1], x, x[:, :1]], dim=1)[:, 1 : 1 + x.shape[1]],
    lambda x: torch.cat([x, x], dim=3)[..., x.shape[3] :],
    lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
]
NAMES = ("out", "lse", "dq", "dk", "dv")


class Call(NamedTuple):
    """A call, but for its tensors, which `tensors_of` makes from the seed."""

    pattern: DilatedPattern
    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    documents: tuple[int, ...] | None
    dtype: torch.dtype
    scale: float | None
    needs_grad: str
    outputs: str  # which results the loss depends on: out, lse, or both
    magnitude: float  # of the gradient of lse
    seed: int
    has_sinks: bool = False

    @property
    def sinks(self):
        """A logit for each head, of which one may be no sink at all."""
        if not self.has_sinks:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        sinks = 3 * torch.randn(self.num_heads, generator=generator, dtype=torch.float64)
        sinks[self.seed % (2 * self.num_heads) :][:1] = -torch.inf
        return sinks.to(self.dtype).requires_grad_()

    @property
    def cu_seqlens(self):
        return borders_of(self.documents)

    @property
    def rules(self):
        """What `dilated_attention` is given beside tensors."""
        return {"pattern": self.pattern, "cu_seqlens": self.cu_seqlens, "scale": self.scale}

    @property
    def shapes(self):
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return tuple((self.batch, self.seq_len, h, self.head_dim) for h in heads)


def borders_of(documents):
    """As `cu_seqlens` takes them."""
    return None if documents is None else torch.tensor(documents, dtype=torch.int32)


def draw_pattern(rng, num_heads):
    heads = rng.choice(["all", "all", "split"])
    num_branches = rng.randint(1, min(3, num_heads) if heads == "split" else 4)
    lengths = [
        rng.choice([rng.randint(1, 12), rng.randint(1, 90), 2**62]) for _ in range(num_branches)
    ]
    rates = [
        rng.choice([1, rng.randint(1, 5), rng.randint(1, 20), 2**40]) for _ in range(num_branches)
    ]
    phase = "modulo" if heads == "split" else rng.choice(["modulo", "blocked"])
    window = None
    if heads == "all" and rng.random() < 0.4:
        window = rng.choice([rng.randint(1, 12), rng.randint(1, 90), 2**62])
        if rng.random() < 0.3:
            lengths, rates = [], []
    is_causal = rng.random() < 0.5
    return DilatedPattern(
        lengths, rates, window=window, is_causal=is_causal, phase=phase, heads=heads
    )


def draw_call(rng, *, dtypes=DTYPES, head_multiple=1, sinks=False):
    num_kv_heads = head_multiple * rng.randint(1, 3)
    num_heads = num_kv_heads * rng.randint(1, 3)
    seq_len = rng.choice(
        [rng.randint(1, 9), rng.randint(1, 48), rng.choice([1, 31, 32, 63, 64, 67])]
    )
    batch = rng.choice([1, 1, 2, 3])
    documents = None
    if batch == 1 and rng.random() < 0.4:
        inner = (
            {rng.randint(1, seq_len - 1) for _ in range(rng.randint(0, 4))}
            if seq_len > 1
            else set()
        )
        documents = (0, *sorted(inner), seq_len)
    dtype = rng.choice(dtypes)
    scales = [None, None, 0.3, 1, 0.0, -0.7, 1e-46, -1e-40, 3.0]
    return Call(
        draw_pattern(rng, num_heads),
        batch,
        seq_len,
        num_heads,
        num_kv_heads,
        rng.choice([1, 3, 8, 16, 24]),
        documents,
        dtype,
        rng.choice(scales),
        rng.choice(["qkv", "qkv", "qkv", "q", "k", "v", "qk", "qv", "kv", ""]),
        rng.choice(["both", "both", "out", "lse"]),
        rng.choice([1.0, 1.0, 1e-3, 65_536.0]),
        rng.randrange(2**31),
        has_sinks=sinks and rng.random() < 0.25,
    )


def draw_heads(rng, call):
    """Some heads of a layer, or all: slices of the query heads and of the key/value heads."""
    start = rng.choice([0, rng.randrange(call.num_kv_heads)])
    stop = rng.choice([call.num_kv_heads, rng.randint(start + 1, call.num_kv_heads)])
    ratio = call.num_heads // call.num_kv_heads
    return slice(start * ratio, stop * ratio), slice(start, stop)


def tensors_of(call):
    """query, key, value and the gradient of out in the call's dtype, and the gradient of lse as its results have it."""
    generator = torch.Generator().manual_seed(call.seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [draw(*shape).to(call.dtype) for shape in call.shapes]
    dout = draw(*call.shapes[0]).to(call.dtype)
    dlse = draw(*call.shapes[0][:3]) * call.magnitude
    return inputs, dout, dlse.to(torch.promote_types(call.dtype, torch.float32))


class Answer(NamedTuple):
    """The definition's numbers, float64, and the absolute values that each is made of."""

    values: dict[str, Tensor]
    sizes: dict[str, Tensor]


def answer_to(call, inputs, dout, dlse):
    """out, lse and the gradients that the loss has. What the loss does not depend on has none."""
    leaves = [x.double().clone().requires_grad_() for x in inputs]
    sinks = None if call.sinks is None else call.sinks.detach().double().requires_grad_()
    rules = {"cu_seqlens": call.documents, "scale": call.scale, "sinks_H": sinks}
    out, lse = dilated_attention_reference(*leaves, call.pattern, **rules)
    dout = dout.double() if call.outputs != "lse" else torch.zeros_like(out)
    dlse = dlse.double() if call.outputs != "out" else torch.zeros_like(lse)
    covered = torch.isfinite(lse)
    loss = (out * dout).sum() + (lse.masked_fill(~covered, 0) * dlse).sum()
    wanted = leaves if sinks is None else [*leaves, sinks]
    grads = torch.autograd.grad(loss, wanted, materialize_grads=True)
    values = dict(zip(NAMES, (out.detach(), lse.detach(), *grads[:3]), strict=True))
    sizes = sizes_of(call, [x.detach() for x in leaves], dout, dlse, lse.detach())
    if sinks is not None:
        values["dsinks"] = grads[3]
        weight = torch.exp(sinks.detach() - lse.detach()).nan_to_num(0)
        delta = (dout.abs() * sizes["out"]).sum(-1) + dlse.abs()
        sizes["dsinks"] = (weight * delta * sizes["lse"]).sum((0, 1))
    return Answer(values, sizes)


def sizes_of(call, inputs, dout, dlse, lse):
    """Like the formulas of attention and its gradient, with absolute values in the place of all terms."""
    scale = call.head_dim**-0.5 if call.scale is None else call.scale
    count = multiplicity(call.pattern, call.seq_len, call.num_heads, call.documents)
    return sizes_of_terms(count, scale, inputs, dout, dlse, lse)


def sizes_of_terms(count, scale, inputs, dout, dlse, lse):
    """As `sizes_of`. count (H, N, N) tells how often a query sees a key. lse may be of more keys than these."""
    ratio = inputs[0].shape[2] // inputs[1].shape[2]
    q, k, v = inputs[0], *(x.repeat_interleave(ratio, dim=2) for x in inputs[1:])
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    lse = lse.transpose(1, 2).masked_fill(lse.transpose(1, 2) == -torch.inf, 0).unsqueeze(-1)
    weights = count * torch.exp(scores.masked_fill(count == 0, -torch.inf) - lse)
    terms = torch.einsum("bihd,bjhd->bhij", q.abs(), k.abs()) * abs(scale)
    # A score's rounding is relative to its terms, and a weight is off by that much: `amount` per eps, at most.
    amount = 1 + terms.amax(-1, keepdim=True).expand_as(weights)
    weights = weights * amount
    out = torch.einsum("bhij,bjhd->bihd", weights, v.abs())
    # Partials are merged by weights w and 1 - w: a partial of hardly any weight still adds eps of its own size.
    out = out + v.abs().amax(1, keepdim=True)
    down = torch.einsum("bihd,bjhd->bhij", dout.abs(), v.abs())
    delta = torch.einsum("bihd,bihd->bhi", dout.abs(), out) + dlse.abs().transpose(1, 2)
    dscores = weights * (down + delta.unsqueeze(-1)) * abs(scale)
    dk = torch.einsum("bhij,bihd->bjhd", dscores, q.abs())
    dv = torch.einsum("bhij,bihd->bjhd", weights, dout.abs())
    grouped = [x.unflatten(2, (-1, ratio)).sum(3) for x in (dk, dv)]
    dq = torch.einsum("bhij,bjhd->bihd", dscores, k.abs())
    number = lse.abs().squeeze(-1) + amount.amax(-1) + 1
    return dict(zip(NAMES, (out, number.transpose(1, 2), dq, *grouped), strict=True))


def difference(call, found, answer):
    """What is wrong with some of the results, or None."""
    for name, x in found.items():
        dtype = torch.promote_types(call.dtype, torch.float32) if name == "lse" else call.dtype
        complaint = why_off(name, x, answer.values[name], answer.sizes[name], dtype, call.dtype)
        if complaint is not None:
            return complaint
    return None


def why_off(name, x, value, size, dtype, computed_in):
    """What is wrong with a result that should be `value` in `dtype`, and was computed in another type perhaps."""
    if x.dtype != dtype or x.shape != value.shape:
        return f"{name} is {x.dtype} {tuple(x.shape)}, and should be {dtype} {tuple(value.shape)}"
    x = x.detach().double()
    tolerance = BOUND * torch.finfo(computed_in).eps * size + max(
        4 * torch.finfo(dtype).tiny, SMALLEST[dtype]
    )
    near = ((x - value).abs() <= tolerance) | (x == value)
    if computed_in == torch.float16:
        near |= (value.abs() > LARGEST) | (size > 1e3 * LARGEST)
    if near.all():
        return None
    place = tuple((~near).nonzero()[0].tolist())
    return (
        f"{name}{list(place)} is {x[place]:.17g} and should be {value[place]:.17g} to within "
        f"{tolerance[place]:.1e}; {int((~near).sum())} of {near.numel()} entries are off"
    )

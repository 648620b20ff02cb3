"""What all kernels share: access to rows in memory, and the loops over blocks of rows.

Names: i_ index, o_ offsets, m_ mask, p_ pointer or `RowView`, b_ block in registers. A *strip* is the rows that a
Triton program holds: BN key rows or BM query rows. HEADS rows are of one position, one for each head of a *bundle*.
The program loops over blocks of the other side's rows. A block has BD >= D columns, a power of two. Scores are in base
2: exp(x) = exp2(x * log2(e)).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import strips

IS_INTERPRETED = triton.knobs.runtime.interpret  # read by triton once, when a kernel is decorated
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Arguments whose value triton must not specialize on: it would compile again for a 1 and for multiples of 16, so with
# packed documents again and again. Triton does specialize on strides: their divisors decide how wide a load can be.
SIZES = (
    *("num_strips", "num_bundles", "num_kv_heads", "num_heads", "num_rows", "num_keys", "num_branches"),
    *("step", "bundle_stride", "head_step"),
)


def device_function(function: Callable) -> Any:
    """A function for use in kernels. Not jitted in the interpreter, where each call would patch triton's language."""
    return function if IS_INTERPRETED else triton.jit(function)


keys_seen = device_function(strips.keys_seen)
queries_seeing = device_function(strips.queries_seeing)
Strip = strips.Strip


class RowView(NamedTuple):
    """Rows of D consecutive numbers, or single numbers: where the first lies, and the strides of heads and of rows."""

    start: tl.tensor
    head: tl.int64
    row: tl.int64


class Places(NamedTuple):
    """Where each row of a block lies, in rows and heads from a view's start (64 bits); a mask of those that exist."""

    row: tl.tensor
    head: tl.tensor
    mask: tl.tensor


class Tables(NamedTuple):
    """What the fused kernels read beside the tensors.

    strips: (num_strips, 4) start and length of the document, the strip's first position in it, number of rows.
    branches: (num_branches, 2) segment length and rate.
    phases: (num_branches, H // HEADS), -1 if the heads do not run the branch.
    """

    strips: tl.tensor
    branches: tl.tensor
    phases: tl.tensor


# Rows that a program holds.


@device_function
def program_of(num_strips: tl.int32, num_bundles: tl.int32, num_kv_heads: tl.int32) -> tuple:
    """This program's strip, bundle of query heads, key/value head that these share, and batch entry."""
    i_r, i_h = tl.program_id(0) % num_strips, tl.program_id(0) // num_strips
    return i_r, i_h % num_bundles, i_h // num_bundles % num_kv_heads, (i_h // num_bundles // num_kv_heads).to(tl.int64)


@device_function
def queries_in_place(
    num_strips: tl.int32, num_bundles: tl.int32, num_kv_heads: tl.int32, num_rows: tl.int32,
    HEADS: tl.constexpr, BM: tl.constexpr,
) -> tuple:  # fmt: skip
    """What this program computes: the batch entry, the key/value head, the first query head, the first position, the
    positions of all its rows, and where these rows lie."""
    i_r, i_c, i_g, i_b = program_of(num_strips, num_bundles, num_kv_heads)
    first = (num_strips - 1 - i_r) * (BM // HEADS)  # if causal, the strips that see most keys come first
    o_i = tl.arange(0, BM)
    o_x = first + o_i // HEADS
    m_x = (o_x < num_rows) & (o_i // HEADS < BM // HEADS)
    i_h = ((i_g * num_bundles + i_c) * HEADS).to(tl.int64)
    return i_b, i_g.to(tl.int64), i_h, first, o_x, Places(o_x.to(tl.int64), (o_i % HEADS).to(tl.int64), m_x)


@device_function
def keys_in_place(
    first: tl.int32, o_x: tl.tensor, num_keys: tl.int32,
    IS_CAUSAL: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
) -> tuple:  # fmt: skip
    """(num_full, num_keys) as from `keys_seen`, if all rows lie in one segment; and the last key that each row sees."""
    num_full = num_keys
    end = num_keys
    b_last = o_x * 0 + num_keys - 1
    if IS_CAUSAL:
        end = tl.minimum(first + BM // HEADS, num_keys)
        num_full = first + 1
        b_last = o_x
    return num_full // BN * BN, end, b_last


@device_function
def load_strip(tables: Tables, i_r: tl.int32) -> Strip:
    document = tl.load(tables.strips + i_r * 4).to(tl.int64)
    length = tl.load(tables.strips + i_r * 4 + 1)
    return Strip(document, length, tl.load(tables.strips + i_r * 4 + 2), tl.load(tables.strips + i_r * 4 + 3))


@device_function
def queries_of_strip(
    tables: Tables, num_strips: tl.int32, num_bundles: tl.int32, num_kv_heads: tl.int32,
    step: tl.int32, bundle_stride: tl.int32, head_step: tl.int32, HEADS: tl.constexpr, BM: tl.constexpr,
) -> tuple:  # fmt: skip
    """Batch entry, key/value head, bundle and first query head; strip, positions in its document, and places."""
    i_r, i_c, i_g, i_b = program_of(num_strips, num_bundles, num_kv_heads)
    i_h = (i_g * num_bundles * HEADS + i_c * bundle_stride).to(tl.int64)
    strip = load_strip(tables, i_r)
    o_i = tl.arange(0, BM)
    o_t = strip.first + o_i // HEADS * step
    at = Places(strip.document + o_t, (o_i % HEADS * head_step).to(tl.int64), o_i // HEADS < strip.num_rows)
    return i_b, i_g, i_c, i_h, strip, o_t, at


@device_function
def load_branch(
    tables: Tables, strip: Strip, step: tl.int32,
    i_w: tl.int32, i_g: tl.int32, i_c: tl.int32, num_kv_heads: tl.int32, num_bundles: tl.int32,
) -> tuple:  # fmt: skip
    """Segment length, rate, phase of a bundle; the first segment in which the strip has rows, and one past the last."""
    width, rate = tl.load(tables.branches + i_w * 2), tl.load(tables.branches + i_w * 2 + 1)
    phase = tl.load(tables.phases + (i_w * num_kv_heads + i_g) * num_bundles + i_c)
    return width, rate, phase, strip.first // width, (strip.first + (strip.num_rows - 1) * step) // width + 1


# Memory.


@device_function
def rows_at(
    p_x: tl.tensor, stride_b: tl.int64, stride_h: tl.int64, stride_m: tl.int64,
    i_b: tl.int64, i_h: tl.int64, first: tl.int64,
) -> RowView:  # fmt: skip
    """The rows of a batch entry from a head and a row on."""
    return RowView(p_x + i_b * stride_b + i_h * stride_h + first * stride_m, stride_h, stride_m)


@device_function
def spaced(x: RowView, first: tl.int64, step: tl.int32, head_step: tl.int32) -> RowView:
    """Every step-th row from `first` on, and every head_step-th head."""
    return RowView(x.start + first * x.row, head_step * x.head, step * x.row)


@device_function
def keys_of_segment(
    p_k: RowView, p_v: RowView, strip: Strip, step: tl.int32, o_t: tl.tensor,
    i_s: tl.int32, width: tl.int32, rate: tl.int32, phase: tl.int32,
    IS_CAUSAL: tl.constexpr, CROSSES: tl.constexpr, BN: tl.constexpr,
) -> tuple:  # fmt: skip
    """Keys and values of a segment and phase, (num_full, num_keys) as from `keys_seen`, and each row's last key."""
    start = i_s * width
    stop = tl.minimum(start + width, strip.length)
    num_full, num_keys = keys_seen(strip, step, start, stop, phase, rate, IS_CAUSAL, BN)
    b_last = o_t * 0 + num_keys - 1
    if IS_CAUSAL:
        b_last = (o_t - start - phase) // rate
    if CROSSES:
        b_last = tl.where((o_t >= start) & (o_t < stop), b_last, -1)
    first = (start + phase).to(tl.int64)
    return spaced(p_k, first, rate, 1), spaced(p_v, first, rate, 1), num_full, num_keys, b_last


@device_function
def offsets(x: RowView, at: Places) -> tl.tensor:
    return at.row * x.row + at.head * x.head


@device_function
def load_rows(x: RowView, at: Places, MASKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr) -> tl.tensor:
    """[rows, BD]: 0 where there is no row, and in the columns from D on."""
    o_d = tl.arange(0, BD)
    p_rows = x.start + offsets(x, at)[:, None] + o_d[None, :]
    if MASKED and D < BD:
        b_x = tl.load(p_rows, mask=at.mask[:, None] & (o_d < D)[None, :], other=0.0)
    elif MASKED:
        b_x = tl.load(p_rows, mask=at.mask[:, None], other=0.0)
    elif D < BD:
        b_x = tl.load(p_rows, mask=(o_d < D)[None, :], other=0.0)
    else:
        b_x = tl.load(p_rows)
    return b_x


@device_function
def store_rows(x: RowView, at: Places, b_x: tl.tensor, ADD: tl.constexpr, D: tl.constexpr, BD: tl.constexpr) -> None:
    """Write [rows, BD], or add it to what is there."""
    o_d = tl.arange(0, BD)
    p_rows = x.start + offsets(x, at)[:, None] + o_d[None, :]
    m_rows = at.mask[:, None] & (o_d < D)[None, :]
    if ADD:
        b_x += tl.load(p_rows, mask=m_rows, other=0.0)
    tl.store(p_rows, b_x.to(x.start.dtype.element_ty), mask=m_rows)


@device_function
def load_sums(lse: RowView, delta: RowView, at: Places) -> tuple:
    """[rows] of lse, in base 2, and of delta. Where there is no row, lse is inf, so that p = exp(s - inf) = 0."""
    b_lse = tl.load(lse.start + offsets(lse, at), mask=at.mask, other=float("inf")) * LOG2_E
    return b_lse, tl.load(delta.start + offsets(delta, at), mask=at.mask, other=0.0)


# Loops over blocks.


@device_function
def attend_block(
    b_q: tl.tensor, b_last: tl.tensor, p_k: RowView, p_v: RowView, i_k: tl.int32, num_keys: tl.int32,
    b_max: tl.tensor, b_sum: tl.tensor, b_out: tl.tensor, scale: tl.float32,
    MASKED: tl.constexpr, SELECT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
) -> tuple:  # fmt: skip
    """One step of the online softmax, over the keys from i_k on. Row i sees keys up to b_last[i]."""
    o_k = i_k + tl.arange(0, BN)
    at = Places(o_k.to(tl.int64), 0, o_k < num_keys)
    # [BN, BD]
    b_k = load_rows(p_k, at, MASKED, D, BD)
    # [BM, BN]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    if MASKED:
        b_s = tl.where(o_k[None, :] <= b_last[:, None], b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
    b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)  # (-inf) - (-inf) is NaN
    b_p = tl.exp2(b_s - b_shift[:, None])
    b_fade = tl.exp2(b_max - b_shift)
    b_new_sum = b_sum * b_fade + tl.sum(b_p, 1)
    b_v = load_rows(p_v, at, MASKED, D, BD)
    b_new_out = tl.dot(b_p.to(b_v.dtype), b_v, b_out * b_fade[:, None], input_precision=PRECISION)
    if SELECT:  # 0 * NaN is NaN: values of another segment must not reach a row
        m_row = b_last >= 0
        b_new_out = tl.where(m_row[:, None], b_new_out, b_out)
    return b_new_max, b_new_sum, b_new_out


@device_function
def attend(
    b_q: tl.tensor, b_last: tl.tensor, p_k: RowView, p_v: RowView, num_full: tl.int32, num_keys: tl.int32,
    b_max: tl.tensor, b_sum: tl.tensor, b_out: tl.tensor, scale: tl.float32,
    SELECT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
) -> tuple:  # fmt: skip
    """The online softmax over keys 0..num_keys-1, of which all rows see the first num_full (whole blocks)."""
    for i_k in range(0, num_full, BN):
        b_max, b_sum, b_out = attend_block(
            b_q, b_last, p_k, p_v, i_k, num_keys, b_max, b_sum, b_out, scale, False, False, PRECISION, D, BD, BN
        )
    for i_k in range(num_full, num_keys, BN):
        b_max, b_sum, b_out = attend_block(
            b_q, b_last, p_k, p_v, i_k, num_keys, b_max, b_sum, b_out, scale, True, SELECT, PRECISION, D, BD, BN
        )
    return b_max, b_sum, b_out


@device_function
def normalized(b_max: tl.tensor, b_sum: tl.tensor, b_out: tl.tensor, LSE_TYPE: tl.constexpr) -> tuple:
    """out and lse of an online softmax; 0 and -inf for a row that saw no key."""
    b_total = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_lse = (b_max.to(LSE_TYPE) + tl.log2(b_total).to(LSE_TYPE)) * LN_2
    b_lse = tl.where(b_sum == 0.0, float("-inf"), b_lse)
    return b_out / b_total[:, None], b_lse


@device_function
def query_gradient(
    b_q: tl.tensor, b_do: tl.tensor, b_lse: tl.tensor, b_delta: tl.tensor, b_last: tl.tensor,
    p_k: RowView, p_v: RowView, num_keys: tl.int32, b_dq: tl.tensor, scale: tl.float32,
    SELECT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """dq += ds k, with ds = p * (dout v^T - delta) and p = exp(s - lse), over the keys 0..num_keys-1.

    The one loop masks every block: with a second loop without masks, registers would spill.
    """
    for i_k in range(0, num_keys, BN):
        o_k = i_k + tl.arange(0, BN)
        at = Places(o_k.to(tl.int64), 0, o_k < num_keys)
        b_k = load_rows(p_k, at, True, D, BD)
        b_v = load_rows(p_v, at, True, D, BD)
        # [BM, BN]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_ds = tl.exp2(b_s - b_lse[:, None]) * (b_dp - b_delta[:, None])
        b_ds = tl.where(o_k[None, :] <= b_last[:, None], b_ds, 0.0)
        b_new_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
        if SELECT:  # 0 * NaN is NaN
            m_row = b_last >= 0
            b_new_dq = tl.where(m_row[:, None], b_new_dq, b_dq)
        b_dq = b_new_dq
    return b_dq


@device_function
def key_gradient(
    b_k: tl.tensor, b_v: tl.tensor, b_first: tl.tensor, p_q: RowView, p_do: RowView, p_lse: RowView, p_delta: RowView,
    begin: tl.int32, end: tl.int32, b_dk: tl.tensor, b_dv: tl.tensor, scale: tl.float32,
    MASKED: tl.constexpr, SELECT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr,
) -> tuple:  # fmt: skip
    """dv += p^T dout and dk += ds^T q over queries begin..end-1, by scores k q^T, so p and ds are never transposed.

    The heads of a bundle lie side by side. With MASKED, key i is seen from position b_first[i] on. With SELECT, b_first
    is `end` for keys of other segments.
    """
    for i_q in range(begin, end, BM):
        o_q = i_q + tl.arange(0, BM)
        at = Places((o_q // HEADS).to(tl.int64), (o_q % HEADS).to(tl.int64), o_q < end)
        b_q = load_rows(p_q, at, True, D, BD)
        b_do = load_rows(p_do, at, True, D, BD)
        b_lse, b_delta = load_sums(p_lse, p_delta, at)
        # [BN, BM]
        b_p = tl.exp2(tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale - b_lse[None, :])
        if MASKED:
            m_see = b_first[:, None] <= (o_q // HEADS)[None, :]
            b_p = tl.where(m_see, b_p, 0.0)
        b_new_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_ds = b_p * (tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION) - b_delta[None, :])
        if SELECT:
            b_ds = tl.where(m_see, b_ds, 0.0)
        b_new_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
        if SELECT:
            m_row = b_first < end
            b_new_dk = tl.where(m_row[:, None], b_new_dk, b_dk)
            b_new_dv = tl.where(m_row[:, None], b_new_dv, b_dv)
        b_dk, b_dv = b_new_dk, b_new_dv
    return b_dk, b_dv

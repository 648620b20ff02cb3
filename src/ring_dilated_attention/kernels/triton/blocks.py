"""The inner loops that all kernels share: a tile of rows held in registers against blocks of rows that stream past.

Names: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block in registers. A block has BM query rows (for each position
PACK heads that share a key/value head) or BN key rows, and BD >= D columns, a power of two.
Scores are in base 2: exp(x) = exp2(x * log2(e)).
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from . import tiles

IS_INTERPRETED = triton.knobs.runtime.interpret  # read by triton once, when a kernel is decorated
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Arguments whose value triton must not look at: it would compile anew for a 1 and for multiples of 16, so with packed
# documents for many steps. Strides stay: what they are multiples of decides how wide a load is.
SIZES = (
    *("num_tiles", "num_packs", "num_kv_heads", "num_heads", "num_rows", "num_keys", "num_branches"),
    *("step", "pack_stride", "head_step"),
)


def _compiled(function: Callable) -> Any:
    """A plain function of integers for use in kernels; the interpreter calls it as it is."""
    return function if IS_INTERPRETED else triton.jit(function)


visit_query_tile = _compiled(tiles.visit_query_tile)
visit_key_tile = _compiled(tiles.visit_key_tile)


@triton.jit
def load_rows(
    p_x: tl.tensor, o_x: tl.tensor, m_x: tl.tensor, MASKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
) -> tl.tensor:
    """[rows, BD]: rows at offsets o_x; 0 where m_x is false, and in the columns from D on."""
    o_d = tl.arange(0, BD)
    p_rows = p_x + o_x[:, None] + o_d[None, :]
    if MASKED and D < BD:
        b_x = tl.load(p_rows, mask=m_x[:, None] & (o_d < D)[None, :], other=0.0)
    elif MASKED:
        b_x = tl.load(p_rows, mask=m_x[:, None], other=0.0)
    elif D < BD:
        b_x = tl.load(p_rows, mask=(o_d < D)[None, :], other=0.0)
    else:
        b_x = tl.load(p_rows)
    return b_x


@triton.jit
def store_rows(
    p_x: tl.tensor, o_x: tl.tensor, m_x: tl.tensor, b_x: tl.tensor, ADD: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
) -> None:
    """Write [rows, BD], or add it to what is there."""
    o_d = tl.arange(0, BD)
    p_rows = p_x + o_x[:, None] + o_d[None, :]
    m_rows = m_x[:, None] & (o_d < D)[None, :]
    if ADD:
        b_x += tl.load(p_rows, mask=m_rows, other=0.0)
    tl.store(p_rows, b_x.to(p_x.dtype.element_ty), mask=m_rows)


@triton.jit
def attend_block(
    b_q: tl.tensor,
    b_last: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    stride_k: tl.int64,
    stride_v: tl.int64,
    i_k: tl.int32,
    num_keys: tl.int32,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_out: tl.tensor,
    scale: tl.float32,
    MASKED: tl.constexpr,
    SELECT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
) -> tuple:
    """One step of the online softmax: keys i_k.. of which row i sees those up to b_last[i]."""
    o_k = i_k + tl.arange(0, BN)
    # [BN, BD]
    b_k = load_rows(p_k, o_k.to(tl.int64) * stride_k, o_k < num_keys, MASKED, D, BD)
    # [BM, BN]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    if MASKED:
        b_s = tl.where(o_k[None, :] <= b_last[:, None], b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
    b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)  # (-inf) - (-inf) is NaN
    b_p = tl.exp2(b_s - b_shift[:, None])
    b_fade = tl.exp2(b_max - b_shift)
    b_new_sum = b_sum * b_fade + tl.sum(b_p, 1)
    b_v = load_rows(p_v, o_k.to(tl.int64) * stride_v, o_k < num_keys, MASKED, D, BD)
    b_new_out = tl.dot(b_p.to(b_v.dtype), b_v, b_out * b_fade[:, None], input_precision=PRECISION)
    if SELECT:  # 0 * NaN is NaN: values of another segment must not reach a row
        m_row = b_last >= 0
        b_new_out = tl.where(m_row[:, None], b_new_out, b_out)
    return b_new_max, b_new_sum, b_new_out


@triton.jit
def attend(
    b_q: tl.tensor,
    b_last: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    stride_k: tl.int64,
    stride_v: tl.int64,
    num_full: tl.int32,
    num_keys: tl.int32,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_out: tl.tensor,
    scale: tl.float32,
    SELECT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
) -> tuple:
    """The online softmax over keys 0..num_keys-1, of which all rows see the first num_full (whole blocks)."""
    # fmt: off
    for i_k in range(0, num_full, BN):
        b_max, b_sum, b_out = attend_block(
            b_q, b_last, p_k, p_v, stride_k, stride_v, i_k, num_keys, b_max, b_sum, b_out, scale,
            False, False, PRECISION, D, BD, BN,
        )
    for i_k in range(num_full, num_keys, BN):
        b_max, b_sum, b_out = attend_block(
            b_q, b_last, p_k, p_v, stride_k, stride_v, i_k, num_keys, b_max, b_sum, b_out, scale,
            True, SELECT, PRECISION, D, BD, BN,
        )
    # fmt: on
    return b_max, b_sum, b_out


@triton.jit
def normalized(b_max: tl.tensor, b_sum: tl.tensor, b_out: tl.tensor, LSE_TYPE: tl.constexpr) -> tuple:
    """out and lse of an online softmax; 0 and -inf for a row that saw no key."""
    b_total = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_lse = (b_max.to(LSE_TYPE) + tl.log2(b_total).to(LSE_TYPE)) * LN_2
    b_lse = tl.where(b_sum == 0.0, float("-inf"), b_lse)
    return b_out / b_total[:, None], b_lse


@triton.jit
def query_gradient(
    b_q: tl.tensor,
    b_do: tl.tensor,
    b_lse: tl.tensor,
    b_delta: tl.tensor,
    b_last: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    stride_k: tl.int64,
    stride_v: tl.int64,
    num_keys: tl.int32,
    b_dq: tl.tensor,
    scale: tl.float32,
    SELECT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
) -> tl.tensor:
    """dq += ds k, with ds = p * (dout v^T - delta) and p = exp(s - lse), over keys as `attend` meets them.

    One loop, masked throughout: beside a loop without masks its registers would spill.
    """
    for i_k in range(0, num_keys, BN):
        o_k = i_k + tl.arange(0, BN)
        b_k = load_rows(p_k, o_k.to(tl.int64) * stride_k, o_k < num_keys, True, D, BD)
        b_v = load_rows(p_v, o_k.to(tl.int64) * stride_v, o_k < num_keys, True, D, BD)
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


@triton.jit
def key_gradient(
    b_k: tl.tensor,
    b_v: tl.tensor,
    b_first: tl.tensor,
    p_q: tl.tensor,
    p_do: tl.tensor,
    p_lse: tl.tensor,
    p_delta: tl.tensor,
    stride_qm: tl.int64,
    stride_qh: tl.int64,
    stride_dm: tl.int64,
    stride_dh: tl.int64,
    stride_lm: tl.int64,
    stride_lh: tl.int64,
    begin: tl.int32,
    end: tl.int32,
    b_dk: tl.tensor,
    b_dv: tl.tensor,
    scale: tl.float32,
    MASKED: tl.constexpr,
    SELECT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
) -> tuple:
    """dv += p^T dout and dk += ds^T q over queries begin..end-1; transposed scores, so that no block in registers is.

    PACK queries of one position follow each other. With MASKED, key i is seen from position b_first[i] on; with SELECT,
    b_first is `end` for keys of other segments.
    """
    for i_q in range(begin, end, BM):
        o_q = i_q + tl.arange(0, BM)
        m_q = o_q < end
        o_m, o_h = (o_q // PACK).to(tl.int64), (o_q % PACK).to(tl.int64)
        b_q = load_rows(p_q, o_m * stride_qm + o_h * stride_qh, m_q, True, D, BD)
        b_do = load_rows(p_do, o_m * stride_dm + o_h * stride_dh, m_q, True, D, BD)
        o_l = o_m * stride_lm + o_h * stride_lh
        b_lse = tl.load(p_lse + o_l, mask=m_q, other=float("inf")) * LOG2_E  # p = 0 beyond the last query
        b_delta = tl.load(p_delta + o_l, mask=m_q, other=0.0)
        # [BN, BM]
        b_p = tl.exp2(tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale - b_lse[None, :])
        if MASKED:
            m_see = b_first[:, None] <= (o_q // PACK)[None, :]
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

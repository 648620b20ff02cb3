"""Backward kernels: delta, dq, and dk with dv, for one tile or for all branches at once.

With s the scores, p = exp(s - lse) the global weights and delta = rowsum(dout * out) - dlse:

    dv = p^T dout      ds = p * (dout v^T - delta)      dq = scale * ds k      dk = scale * ds^T q

One Triton program sums each row of a result, in a fixed order and without atomics. So every run gives the same result
to the bit. Names and tables as in `blocks.py`. delta has the strides of lse.
"""

import triton
import triton.language as tl

from . import blocks
from .blocks import LOG2_E, SIZES, Places, Tables, load_branch, load_rows, offsets, rows_at, spaced, store_rows


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    dout: tl.tensor, out: tl.tensor, dlse: tl.tensor, delta: tl.tensor, num_heads: tl.int32, num_rows: tl.int32,
    stride_db: tl.int64, stride_dm: tl.int64, stride_dh: tl.int64,
    stride_ob: tl.int64, stride_om: tl.int64, stride_oh: tl.int64,
    stride_gb: tl.int64, stride_gm: tl.int64, stride_gh: tl.int64,
    stride_eb: tl.int64, stride_em: tl.int64, stride_eh: tl.int64,
    HAS_DLSE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
) -> None:  # fmt: skip
    """delta (B, N, H) of (B, N, H, D); strides d of dout, o of out, g of dlse, e of delta."""
    i_r, _, i_h, i_b = blocks.program_of(tl.cdiv(num_rows, BM), 1, num_heads)
    i_h = i_h.to(tl.int64)
    o_x = i_r * BM + tl.arange(0, BM)
    at = Places(o_x.to(tl.int64), 0, o_x < num_rows)
    b_do = load_rows(rows_at(dout, stride_db, stride_dh, stride_dm, i_b, i_h, 0), at, True, D, BD)
    b_o = load_rows(rows_at(out, stride_ob, stride_oh, stride_om, i_b, i_h, 0), at, True, D, BD)
    b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    if HAS_DLSE:
        p_dlse = rows_at(dlse, stride_gb, stride_gh, stride_gm, i_b, i_h, 0)
        b_delta -= tl.load(p_dlse.start + offsets(p_dlse, at), mask=at.mask, other=0.0)
    p_delta = rows_at(delta, stride_eb, stride_eh, stride_em, i_b, i_h, 0)
    tl.store(p_delta.start + offsets(p_delta, at), b_delta, mask=at.mask)


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, lse: tl.tensor, delta: tl.tensor, dq: tl.tensor,
    scale: tl.float32,
    num_strips: tl.int32, num_bundles: tl.int32, num_kv_heads: tl.int32, num_rows: tl.int32, num_keys: tl.int32,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qm: tl.int64,
    stride_kb: tl.int64, stride_kg: tl.int64, stride_kl: tl.int64,
    stride_vb: tl.int64, stride_vg: tl.int64, stride_vl: tl.int64,
    stride_db: tl.int64, stride_dh: tl.int64, stride_dm: tl.int64,
    stride_lb: tl.int64, stride_lh: tl.int64, stride_lm: tl.int64,
    stride_gb: tl.int64, stride_gh: tl.int64, stride_gm: tl.int64,
    IS_CAUSAL: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """dq, for views as in `forward_kernel`; strides d of dout, l of lse and delta, g of dq. ACCUMULATE: add to dq."""
    i_b, i_g, i_h, first, o_x, at = blocks.queries_in_place(num_strips, num_bundles, num_kv_heads, num_rows, HEADS, BM)
    p_k = rows_at(k, stride_kb, stride_kg, stride_kl, i_b, i_g, 0)
    p_v = rows_at(v, stride_vb, stride_vg, stride_vl, i_b, i_g, 0)
    p_lse = rows_at(lse, stride_lb, stride_lh, stride_lm, i_b, i_h, 0)
    p_delta = rows_at(delta, stride_lb, stride_lh, stride_lm, i_b, i_h, 0)
    # [BM, BD]
    b_q = load_rows(rows_at(q, stride_qb, stride_qh, stride_qm, i_b, i_h, 0), at, True, D, BD)
    b_do = load_rows(rows_at(dout, stride_db, stride_dh, stride_dm, i_b, i_h, 0), at, True, D, BD)
    b_lse, b_delta = blocks.load_sums(p_lse, p_delta, at)
    _, end, b_last = blocks.keys_in_place(first, o_x, num_keys, IS_CAUSAL, HEADS, BM, BN)
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_dq = blocks.query_gradient(
        b_q, b_do, b_lse, b_delta, b_last, p_k, p_v, end, b_dq, scale * LOG2_E, False, PRECISION, D, BD, BN,
    )  # fmt: skip
    p_dq = rows_at(dq, stride_gb, stride_gh, stride_gm, i_b, i_h, 0)
    store_rows(p_dq, at, b_dq * scale, ACCUMULATE, D, BD)


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, lse: tl.tensor, delta: tl.tensor,
    dk: tl.tensor, dv: tl.tensor, scale: tl.float32,
    num_strips: tl.int32, num_bundles: tl.int32, num_kv_heads: tl.int32, num_rows: tl.int32, num_keys: tl.int32,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qm: tl.int64,
    stride_kb: tl.int64, stride_kg: tl.int64, stride_kl: tl.int64,
    stride_vb: tl.int64, stride_vg: tl.int64, stride_vl: tl.int64,
    stride_db: tl.int64, stride_dh: tl.int64, stride_dm: tl.int64,
    stride_lb: tl.int64, stride_lh: tl.int64, stride_lm: tl.int64,
    stride_xb: tl.int64, stride_xg: tl.int64, stride_xl: tl.int64,
    stride_yb: tl.int64, stride_yg: tl.int64, stride_yl: tl.int64,
    IS_CAUSAL: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """dk and dv, summed over the query heads that share them; strides x of dk and y of dv."""
    i_r, _, i_g, i_b = blocks.program_of(num_strips, 1, num_kv_heads)
    i_g = i_g.to(tl.int64)
    first = i_r * BN
    o_x = first + tl.arange(0, BN)
    at = Places(o_x.to(tl.int64), 0, o_x < num_keys)
    # [BN, BD]
    b_k = load_rows(rows_at(k, stride_kb, stride_kg, stride_kl, i_b, i_g, 0), at, True, D, BD)
    b_v = load_rows(rows_at(v, stride_vb, stride_vg, stride_vl, i_b, i_g, 0), at, True, D, BD)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)
    begin = 0
    if IS_CAUSAL:
        begin = first * HEADS // BM * BM
    for i_c in range(num_bundles):
        i_h = (i_g * num_bundles + i_c) * HEADS
        p_q = rows_at(q, stride_qb, stride_qh, stride_qm, i_b, i_h, 0)
        p_do = rows_at(dout, stride_db, stride_dh, stride_dm, i_b, i_h, 0)
        p_lse = rows_at(lse, stride_lb, stride_lh, stride_lm, i_b, i_h, 0)
        p_delta = rows_at(delta, stride_lb, stride_lh, stride_lm, i_b, i_h, 0)
        b_dk, b_dv = blocks.key_gradient(
            b_k, b_v, o_x, p_q, p_do, p_lse, p_delta, begin, num_rows * HEADS, b_dk, b_dv, scale * LOG2_E,
            IS_CAUSAL, False, PRECISION, D, BD, HEADS, BM,
        )  # fmt: skip
    store_rows(rows_at(dk, stride_xb, stride_xg, stride_xl, i_b, i_g, 0), at, b_dk * scale, ACCUMULATE, D, BD)
    store_rows(rows_at(dv, stride_yb, stride_yg, stride_yl, i_b, i_g, 0), at, b_dv, ACCUMULATE, D, BD)


@triton.jit(do_not_specialize=SIZES)
def fused_query_gradient_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, lse: tl.tensor, delta: tl.tensor, dq: tl.tensor,
    strips: tl.tensor, branches: tl.tensor, phases: tl.tensor, scale: tl.float32,
    num_strips: tl.int32, num_bundles: tl.int32, num_kv_heads: tl.int32, num_branches: tl.int32,
    step: tl.int32, bundle_stride: tl.int32, head_step: tl.int32,
    stride_qb: tl.int64, stride_qn: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kg: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vg: tl.int64,
    stride_db: tl.int64, stride_dn: tl.int64, stride_dh: tl.int64,
    stride_lb: tl.int64, stride_ln: tl.int64, stride_lh: tl.int64,
    stride_gb: tl.int64, stride_gn: tl.int64, stride_gh: tl.int64,
    IS_CAUSAL: tl.constexpr, CROSSES: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """dq of (B, N, H, D) over all branches; strides d of dout, l of lse and of delta, g of dq."""
    tables = Tables(strips, branches, phases)
    i_b, i_g, i_c, i_h, strip, o_t, at = blocks.queries_of_strip(
        tables, num_strips, num_bundles, num_kv_heads, step, bundle_stride, head_step, HEADS, BM
    )
    p_k = rows_at(k, stride_kb, stride_kg, stride_kn, i_b, i_g, strip.document)
    p_v = rows_at(v, stride_vb, stride_vg, stride_vn, i_b, i_g, strip.document)
    p_lse = rows_at(lse, stride_lb, stride_lh, stride_ln, i_b, i_h, 0)
    p_delta = rows_at(delta, stride_lb, stride_lh, stride_ln, i_b, i_h, 0)
    # [BM, BD]
    b_q = load_rows(rows_at(q, stride_qb, stride_qh, stride_qn, i_b, i_h, 0), at, True, D, BD)
    b_do = load_rows(rows_at(dout, stride_db, stride_dh, stride_dn, i_b, i_h, 0), at, True, D, BD)
    b_lse, b_delta = blocks.load_sums(p_lse, p_delta, at)
    b_dq = tl.zeros([BM, BD], tl.float32)
    for i_w in range(num_branches):
        width, rate, phase, i_first, i_end = load_branch(tables, strip, step, i_w, i_g, i_c, num_kv_heads, num_bundles)
        for i_s in range(i_first, i_end):
            p_k_seen, p_v_seen, _, end, b_last = blocks.keys_of_segment(
                p_k, p_v, strip, step, o_t, i_s, width, rate, phase, IS_CAUSAL, CROSSES, BN
            )
            b_dq = blocks.query_gradient(
                b_q, b_do, b_lse, b_delta, b_last, p_k_seen, p_v_seen, end, b_dq, scale * LOG2_E,
                CROSSES, PRECISION, D, BD, BN,
            )  # fmt: skip
    p_dq = rows_at(dq, stride_gb, stride_gh, stride_gn, i_b, i_h, 0)
    store_rows(p_dq, at, b_dq * scale, False, D, BD)


@triton.jit(do_not_specialize=SIZES)
def fused_key_gradient_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, lse: tl.tensor, delta: tl.tensor,
    dk: tl.tensor, dv: tl.tensor, strips: tl.tensor, branches: tl.tensor, phases: tl.tensor, scale: tl.float32,
    num_strips: tl.int32, num_bundles: tl.int32, num_kv_heads: tl.int32, num_branches: tl.int32,
    step: tl.int32, bundle_stride: tl.int32, head_step: tl.int32,
    stride_qb: tl.int64, stride_qn: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kg: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vg: tl.int64,
    stride_db: tl.int64, stride_dn: tl.int64, stride_dh: tl.int64,
    stride_lb: tl.int64, stride_ln: tl.int64, stride_lh: tl.int64,
    stride_xb: tl.int64, stride_xn: tl.int64, stride_xg: tl.int64,
    stride_yb: tl.int64, stride_yn: tl.int64, stride_yg: tl.int64,
    IS_CAUSAL: tl.constexpr, CROSSES: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """dk and dv of (B, N, G, D), summed over the query heads that share them; strides x of dk and y of dv."""
    tables = Tables(strips, branches, phases)
    i_r, _, i_g, i_b = blocks.program_of(num_strips, 1, num_kv_heads)
    i_kg = i_g.to(tl.int64)
    strip = blocks.load_strip(tables, i_r)
    o_i = tl.arange(0, BN)
    o_t = strip.first + o_i * step
    at = Places(strip.document + o_t, 0, o_i < strip.num_rows)
    # [BN, BD]
    b_k = load_rows(rows_at(k, stride_kb, stride_kg, stride_kn, i_b, i_kg, 0), at, True, D, BD)
    b_v = load_rows(rows_at(v, stride_vb, stride_vg, stride_vn, i_b, i_kg, 0), at, True, D, BD)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)
    for i_cw in range(num_bundles * num_branches):
        i_c, i_w = i_cw // num_branches, i_cw % num_branches
        i_h = (i_g * num_bundles * HEADS + i_c * bundle_stride).to(tl.int64)
        width, rate, phase, i_first, i_end = load_branch(tables, strip, step, i_w, i_g, i_c, num_kv_heads, num_bundles)
        for i_s in range(i_first, i_end):
            start = i_s * width
            stop = tl.minimum(start + width, strip.length)
            begin, end = blocks.queries_seeing(strip, step, start, stop, phase, rate, IS_CAUSAL, HEADS, BM)
            b_first = o_t * 0
            if IS_CAUSAL:
                b_first = (o_t - start - phase) // rate
            if CROSSES:
                b_first = tl.where((o_t >= start) & (o_t < stop), b_first, end)
            o_q = strip.document + start + phase
            p_q = rows_at(q, stride_qb, stride_qh, stride_qn, i_b, i_h, o_q)
            p_do = rows_at(dout, stride_db, stride_dh, stride_dn, i_b, i_h, o_q)
            p_lse = spaced(rows_at(lse, stride_lb, stride_lh, stride_ln, i_b, i_h, o_q), 0, rate, head_step)
            p_delta = spaced(rows_at(delta, stride_lb, stride_lh, stride_ln, i_b, i_h, o_q), 0, rate, head_step)
            b_dk, b_dv = blocks.key_gradient(
                b_k, b_v, b_first, spaced(p_q, 0, rate, head_step), spaced(p_do, 0, rate, head_step), p_lse, p_delta,
                begin, end, b_dk, b_dv, scale * LOG2_E,
                IS_CAUSAL or CROSSES, CROSSES, PRECISION, D, BD, HEADS, BM,
            )  # fmt: skip
    store_rows(rows_at(dk, stride_xb, stride_xg, stride_xn, i_b, i_kg, 0), at, b_dk * scale, False, D, BD)
    store_rows(rows_at(dv, stride_yb, stride_yg, stride_yn, i_b, i_kg, 0), at, b_dv, False, D, BD)

"""Backward kernels over all branches of a pattern at once: dq by query tiles, dk and dv by key tiles, written once.

Tables as in `forward.fused_forward_kernel`, equations as in `backward.py`. `lse` and `delta` are contiguous (B, N, H).
"""

import triton
import triton.language as tl

from .blocks import LOG2_E, SIZES, key_gradient, load_rows, query_gradient, store_rows, visit_key_tile, visit_query_tile


@triton.jit(do_not_specialize=SIZES)
def fused_query_gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dq: tl.tensor,
    tiles: tl.tensor,
    branches: tl.tensor,
    phases: tl.tensor,
    scale: tl.float32,
    num_tiles: tl.int32,
    num_packs: tl.int32,
    num_kv_heads: tl.int32,
    num_branches: tl.int32,
    step: tl.int32,
    pack_stride: tl.int32,
    head_step: tl.int32,
    stride_qb: tl.int64,
    stride_qn: tl.int64,
    stride_qh: tl.int64,
    stride_kb: tl.int64,
    stride_kn: tl.int64,
    stride_kg: tl.int64,
    stride_vb: tl.int64,
    stride_vn: tl.int64,
    stride_vg: tl.int64,
    stride_db: tl.int64,
    stride_dn: tl.int64,
    stride_dh: tl.int64,
    stride_lb: tl.int64,
    stride_ln: tl.int64,
    stride_lh: tl.int64,
    stride_gb: tl.int64,
    stride_gn: tl.int64,
    stride_gh: tl.int64,
    IS_CAUSAL: tl.constexpr,
    CROSSES: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    """dq of (B, N, H, D); strides d of dout, l of lse and of delta, g of dq."""
    i_t, i_h = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    i_c, i_g = i_h % num_packs, i_h // num_packs % num_kv_heads
    i_b = (i_h // num_packs // num_kv_heads).to(tl.int64)
    i_qh = (i_g * num_packs * PACK + i_c * pack_stride).to(tl.int64)
    i_kg = i_g.to(tl.int64)
    document = tl.load(tiles + i_t * 4).to(tl.int64)
    length = tl.load(tiles + i_t * 4 + 1)
    first = tl.load(tiles + i_t * 4 + 2)
    count = tl.load(tiles + i_t * 4 + 3)

    o_i = tl.arange(0, BM)
    o_t = first + o_i // PACK * step
    m_t = o_i // PACK < count
    o_n, o_h = document + o_t, (o_i % PACK * head_step).to(tl.int64)
    o_l = i_b * stride_lb + i_qh * stride_lh + o_n * stride_ln + o_h * stride_lh
    p_k = k + i_b * stride_kb + i_kg * stride_kg + document * stride_kn
    p_v = v + i_b * stride_vb + i_kg * stride_vg + document * stride_vn
    # [BM, BD]
    b_q = load_rows(q + i_b * stride_qb + i_qh * stride_qh, o_n * stride_qn + o_h * stride_qh, m_t, True, D, BD)
    b_do = load_rows(dout + i_b * stride_db + i_qh * stride_dh, o_n * stride_dn + o_h * stride_dh, m_t, True, D, BD)
    b_lse = tl.load(lse + o_l, mask=m_t, other=float("inf")) * LOG2_E
    b_delta = tl.load(delta + o_l, mask=m_t, other=0.0)
    b_dq = tl.zeros([BM, BD], tl.float32)
    for i_w in range(num_branches):
        width = tl.load(branches + i_w * 2)
        rate = tl.load(branches + i_w * 2 + 1)
        phase = tl.load(phases + (i_w * num_kv_heads + i_g) * num_packs + i_c)
        for i_s in range(first // width, (first + (count - 1) * step) // width + 1):
            start = i_s * width
            stop = tl.minimum(start + width, length)
            _, end = visit_query_tile(first, step, count, start, stop, phase, rate, IS_CAUSAL, BN)
            b_last = o_t * 0 + end - 1
            if IS_CAUSAL:
                b_last = (o_t - start - phase) // rate
            if CROSSES:
                b_last = tl.where((o_t >= start) & (o_t < stop), b_last, -1)
            o_k = (start + phase).to(tl.int64)
            # fmt: off
            b_dq = query_gradient(
                b_q, b_do, b_lse, b_delta, b_last, p_k + o_k * stride_kn, p_v + o_k * stride_vn, rate * stride_kn,
                rate * stride_vn, end, b_dq, scale * LOG2_E, CROSSES, PRECISION, D, BD, BN,
            )
            # fmt: on
    p_dq = dq + i_b * stride_gb + i_qh * stride_gh
    store_rows(p_dq, o_n * stride_gn + o_h * stride_gh, m_t, b_dq * scale, False, D, BD)


@triton.jit(do_not_specialize=SIZES)
def fused_key_gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    tiles: tl.tensor,
    branches: tl.tensor,
    phases: tl.tensor,
    scale: tl.float32,
    num_tiles: tl.int32,
    num_packs: tl.int32,
    num_kv_heads: tl.int32,
    num_branches: tl.int32,
    step: tl.int32,
    pack_stride: tl.int32,
    head_step: tl.int32,
    stride_qb: tl.int64,
    stride_qn: tl.int64,
    stride_qh: tl.int64,
    stride_kb: tl.int64,
    stride_kn: tl.int64,
    stride_kg: tl.int64,
    stride_vb: tl.int64,
    stride_vn: tl.int64,
    stride_vg: tl.int64,
    stride_db: tl.int64,
    stride_dn: tl.int64,
    stride_dh: tl.int64,
    stride_lb: tl.int64,
    stride_ln: tl.int64,
    stride_lh: tl.int64,
    stride_xb: tl.int64,
    stride_xn: tl.int64,
    stride_xg: tl.int64,
    stride_yb: tl.int64,
    stride_yn: tl.int64,
    stride_yg: tl.int64,
    IS_CAUSAL: tl.constexpr,
    CROSSES: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    """dk and dv of (B, N, G, D), summed over the query heads that share them; strides x of dk and y of dv."""
    i_t, i_h = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    i_b, i_g = (i_h // num_kv_heads).to(tl.int64), i_h % num_kv_heads
    i_kg = i_g.to(tl.int64)
    document = tl.load(tiles + i_t * 4).to(tl.int64)
    length = tl.load(tiles + i_t * 4 + 1)
    first = tl.load(tiles + i_t * 4 + 2)
    count = tl.load(tiles + i_t * 4 + 3)

    o_i = tl.arange(0, BN)
    o_t = first + o_i * step
    m_t = o_i < count
    o_n = document + o_t
    # [BN, BD]
    b_k = load_rows(k + i_b * stride_kb + i_kg * stride_kg, o_n * stride_kn, m_t, True, D, BD)
    b_v = load_rows(v + i_b * stride_vb + i_kg * stride_vg, o_n * stride_vn, m_t, True, D, BD)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)
    for i_cw in range(num_packs * num_branches):
        i_c, i_w = i_cw // num_branches, i_cw % num_branches
        i_qh = (i_g * num_packs * PACK + i_c * pack_stride).to(tl.int64)
        width = tl.load(branches + i_w * 2)
        rate = tl.load(branches + i_w * 2 + 1)
        phase = tl.load(phases + (i_w * num_kv_heads + i_g) * num_packs + i_c)
        for i_s in range(first // width, (first + (count - 1) * step) // width + 1):
            start = i_s * width
            stop = tl.minimum(start + width, length)
            begin, end = visit_key_tile(first, step, count, start, stop, phase, rate, IS_CAUSAL, PACK, BM)
            b_first = o_t * 0
            if IS_CAUSAL:
                b_first = (o_t - start - phase) // rate
            if CROSSES:
                b_first = tl.where((o_t >= start) & (o_t < stop), b_first, end)
            o_q = document + start + phase
            o_l = i_b * stride_lb + i_qh * stride_lh + o_q * stride_ln
            p_q = q + i_b * stride_qb + i_qh * stride_qh + o_q * stride_qn
            p_do = dout + i_b * stride_db + i_qh * stride_dh + o_q * stride_dn
            # fmt: off
            b_dk, b_dv = key_gradient(
                b_k, b_v, b_first, p_q, p_do, lse + o_l, delta + o_l, rate * stride_qn, head_step * stride_qh,
                rate * stride_dn, head_step * stride_dh, rate * stride_ln, head_step * stride_lh, begin, end,
                b_dk, b_dv, scale * LOG2_E, IS_CAUSAL or CROSSES, CROSSES, PRECISION, D, BD, PACK, BM,
            )
            # fmt: on
    store_rows(dk + i_b * stride_xb + i_kg * stride_xg, o_n * stride_xn, m_t, b_dk * scale, False, D, BD)
    store_rows(dv + i_b * stride_yb + i_kg * stride_yg, o_n * stride_yn, m_t, b_dv, False, D, BD)

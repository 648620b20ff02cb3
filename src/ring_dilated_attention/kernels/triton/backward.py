"""Backward kernels for strided views: delta, dq, and dk with dv. `lse` is the global one, so p is the global weight.

With s the scores, p = exp(s - lse) and delta = rowsum(dout * out) - dlse:

    dv = p^T dout      ds = p * (dout v^T - delta)      dq = scale * ds k      dk = scale * ds^T q

Every row of a result is summed by one program in one order, without atomics: equal from run to run to the bit.
Names as in `blocks.py`.
"""

import triton
import triton.language as tl

from .blocks import LOG2_E, SIZES, key_gradient, load_rows, query_gradient, store_rows


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    dout: tl.tensor,
    out: tl.tensor,
    dlse: tl.tensor,
    delta: tl.tensor,
    num_heads: tl.int32,
    num_rows: tl.int32,
    stride_db: tl.int64,
    stride_dm: tl.int64,
    stride_dh: tl.int64,
    stride_ob: tl.int64,
    stride_om: tl.int64,
    stride_oh: tl.int64,
    stride_gb: tl.int64,
    stride_gm: tl.int64,
    stride_gh: tl.int64,
    stride_eb: tl.int64,
    stride_em: tl.int64,
    stride_eh: tl.int64,
    HAS_DLSE: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """delta (B, N, H) of (B, N, H, D); strides d of dout, o of out, g of dlse, e of delta."""
    num_tiles = tl.cdiv(num_rows, BM)
    i_t, i_h = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    i_b, i_h = (i_h // num_heads).to(tl.int64), (i_h % num_heads).to(tl.int64)
    o_x = i_t * BM + tl.arange(0, BM)
    m_x = o_x < num_rows
    o_m = o_x.to(tl.int64)
    b_do = load_rows(dout + i_b * stride_db + i_h * stride_dh, o_m * stride_dm, m_x, True, D, BD)
    b_o = load_rows(out + i_b * stride_ob + i_h * stride_oh, o_m * stride_om, m_x, True, D, BD)
    b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    if HAS_DLSE:
        b_delta -= tl.load(dlse + i_b * stride_gb + i_h * stride_gh + o_m * stride_gm, mask=m_x, other=0.0)
    tl.store(delta + i_b * stride_eb + i_h * stride_eh + o_m * stride_em, b_delta, mask=m_x)


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dq: tl.tensor,
    scale: tl.float32,
    num_tiles: tl.int32,
    num_packs: tl.int32,
    num_kv_heads: tl.int32,
    num_rows: tl.int32,
    num_keys: tl.int32,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qm: tl.int64,
    stride_kb: tl.int64,
    stride_kg: tl.int64,
    stride_kl: tl.int64,
    stride_vb: tl.int64,
    stride_vg: tl.int64,
    stride_vl: tl.int64,
    stride_db: tl.int64,
    stride_dh: tl.int64,
    stride_dm: tl.int64,
    stride_lb: tl.int64,
    stride_lh: tl.int64,
    stride_lm: tl.int64,
    stride_gb: tl.int64,
    stride_gh: tl.int64,
    stride_gm: tl.int64,
    IS_CAUSAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    """dq of views as in `forward_kernel`; strides d of dout, l of lse and of delta, g of dq. ACCUMULATE adds."""
    i_t = num_tiles - 1 - tl.program_id(0) % num_tiles
    i_h = tl.program_id(0) // num_tiles
    i_c, i_g = i_h % num_packs, i_h // num_packs % num_kv_heads
    i_b = (i_h // num_packs // num_kv_heads).to(tl.int64)
    i_qh = ((i_g * num_packs + i_c) * PACK).to(tl.int64)
    i_kg = i_g.to(tl.int64)
    first = i_t * (BM // PACK)

    o_i = tl.arange(0, BM)
    o_x = first + o_i // PACK
    m_x = (o_x < num_rows) & (o_i // PACK < BM // PACK)
    o_m, o_h = o_x.to(tl.int64), (o_i % PACK).to(tl.int64)
    o_l = i_b * stride_lb + i_qh * stride_lh + o_m * stride_lm + o_h * stride_lh
    # [BM, BD]
    b_q = load_rows(q + i_b * stride_qb + i_qh * stride_qh, o_m * stride_qm + o_h * stride_qh, m_x, True, D, BD)
    b_do = load_rows(dout + i_b * stride_db + i_qh * stride_dh, o_m * stride_dm + o_h * stride_dh, m_x, True, D, BD)
    b_lse = tl.load(lse + o_l, mask=m_x, other=float("inf")) * LOG2_E
    b_delta = tl.load(delta + o_l, mask=m_x, other=0.0)
    end = num_keys
    b_last = o_x * 0 + num_keys - 1
    if IS_CAUSAL:
        end = tl.minimum(first + BM // PACK, num_keys)
        b_last = o_x
    p_k = k + i_b * stride_kb + i_kg * stride_kg
    p_v = v + i_b * stride_vb + i_kg * stride_vg
    b_dq = tl.zeros([BM, BD], tl.float32)
    # fmt: off
    b_dq = query_gradient(
        b_q, b_do, b_lse, b_delta, b_last, p_k, p_v, stride_kl, stride_vl, end, b_dq, scale * LOG2_E,
        False, PRECISION, D, BD, BN,
    )
    # fmt: on
    p_dq, o_dq = dq + i_b * stride_gb + i_qh * stride_gh, o_m * stride_gm + o_h * stride_gh
    store_rows(p_dq, o_dq, m_x, b_dq * scale, ACCUMULATE, D, BD)


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    scale: tl.float32,
    num_tiles: tl.int32,
    num_packs: tl.int32,
    num_kv_heads: tl.int32,
    num_rows: tl.int32,
    num_keys: tl.int32,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qm: tl.int64,
    stride_kb: tl.int64,
    stride_kg: tl.int64,
    stride_kl: tl.int64,
    stride_vb: tl.int64,
    stride_vg: tl.int64,
    stride_vl: tl.int64,
    stride_db: tl.int64,
    stride_dh: tl.int64,
    stride_dm: tl.int64,
    stride_lb: tl.int64,
    stride_lh: tl.int64,
    stride_lm: tl.int64,
    stride_xb: tl.int64,
    stride_xg: tl.int64,
    stride_xl: tl.int64,
    stride_yb: tl.int64,
    stride_yg: tl.int64,
    stride_yl: tl.int64,
    IS_CAUSAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    """dk and dv, summed over the query heads that share them; strides x of dk and y of dv."""
    i_t, i_h = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    i_b, i_g = (i_h // num_kv_heads).to(tl.int64), (i_h % num_kv_heads).to(tl.int64)
    first = i_t * BN
    o_x = first + tl.arange(0, BN)
    m_x = o_x < num_keys
    o_l = o_x.to(tl.int64)
    # [BN, BD]
    b_k = load_rows(k + i_b * stride_kb + i_g * stride_kg, o_l * stride_kl, m_x, True, D, BD)
    b_v = load_rows(v + i_b * stride_vb + i_g * stride_vg, o_l * stride_vl, m_x, True, D, BD)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)
    begin = 0
    if IS_CAUSAL:
        begin = first * PACK // BM * BM
    for i_c in range(num_packs):
        i_qh = (i_g * num_packs + i_c) * PACK
        p_l = i_b * stride_lb + i_qh * stride_lh
        p_q = q + i_b * stride_qb + i_qh * stride_qh
        p_do = dout + i_b * stride_db + i_qh * stride_dh
        # fmt: off
        b_dk, b_dv = key_gradient(
            b_k, b_v, o_x, p_q, p_do, lse + p_l, delta + p_l, stride_qm, stride_qh, stride_dm, stride_dh, stride_lm,
            stride_lh, begin, num_rows * PACK, b_dk, b_dv, scale * LOG2_E,
            IS_CAUSAL, False, PRECISION, D, BD, PACK, BM,
        )
        # fmt: on
    store_rows(dk + i_b * stride_xb + i_g * stride_xg, o_l * stride_xl, m_x, b_dk * scale, ACCUMULATE, D, BD)
    store_rows(dv + i_b * stride_yb + i_g * stride_yg, o_l * stride_yl, m_x, b_dv, ACCUMULATE, D, BD)

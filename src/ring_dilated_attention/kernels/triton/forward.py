"""Forward kernels: one tile of rows x one tile of keys' rows at a time, or all branches at once.

q, k, v are strided views; a row is D consecutive numbers. PACK query heads of one position, which share a key/value
head, follow each other in a tile: row i is position i // PACK, head i % PACK. Offsets of rows are 64-bit.
"""

import triton
import triton.language as tl

from .blocks import LOG2_E, SIZES, attend, load_rows, normalized, store_rows, visit_query_tile


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
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
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_om: tl.int64,
    stride_lb: tl.int64,
    stride_lh: tl.int64,
    stride_lm: tl.int64,
    IS_CAUSAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    """A partial of (B, H, M, D) queries over (B, G, L, D) keys; a key/value head serves num_packs * PACK query heads.

    With ACCUMULATE, out and lse hold the partial of other keys, which is the state that the online softmax starts from:
    (max, sum, acc) = (lse, 1, out). A float64 lse is (max, sum) = (its float32, exp of the rest). Causal is for M == L.
    """
    i_t = num_tiles - 1 - tl.program_id(0) % num_tiles  # causal: the long ones first
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
    p_k = k + i_b * stride_kb + i_kg * stride_kg
    p_v = v + i_b * stride_vb + i_kg * stride_vg
    p_out = out + i_b * stride_ob + i_qh * stride_oh
    p_lse = lse + i_b * stride_lb + i_qh * stride_lh + o_m * stride_lm + o_h * stride_lh
    o_out = o_m * stride_om + o_h * stride_oh

    # [BM, BD]
    b_q = load_rows(q + i_b * stride_qb + i_qh * stride_qh, o_m * stride_qm + o_h * stride_qh, m_x, True, D, BD)
    if ACCUMULATE:
        b_lse = tl.load(p_lse, mask=m_x, other=float("-inf")) * LOG2_E
        b_max = b_lse.to(tl.float32)
        b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)  # (-inf) - (-inf) is NaN
        b_sum = tl.exp2((b_lse - b_shift).to(tl.float32))  # 1, and what rounding to float32 takes from lse
        b_out = load_rows(p_out, o_out, m_x, True, D, BD).to(tl.float32) * b_sum[:, None]
    else:
        b_max = tl.full([BM], float("-inf"), tl.float32)
        b_sum = tl.zeros([BM], tl.float32)
        b_out = tl.zeros([BM, BD], tl.float32)
    end = num_keys
    full = num_keys
    b_last = o_x * 0 + num_keys - 1
    if IS_CAUSAL:
        end = tl.minimum(first + BM // PACK, num_keys)
        full = first + 1
        b_last = o_x
    full = full // BN * BN
    # fmt: off
    b_max, b_sum, b_out = attend(
        b_q, b_last, p_k, p_v, stride_kl, stride_vl, full, end, b_max, b_sum, b_out, scale * LOG2_E,
        False, PRECISION, D, BD, BN,
    )
    # fmt: on
    b_out, b_lse = normalized(b_max, b_sum, b_out, lse.dtype.element_ty)
    store_rows(p_out, o_out, m_x, b_out, False, D, BD)
    tl.store(p_lse, b_lse, mask=m_x)


@triton.jit(do_not_specialize=SIZES)
def fused_forward_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
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
    stride_ob: tl.int64,
    stride_on: tl.int64,
    stride_oh: tl.int64,
    stride_lb: tl.int64,
    stride_ln: tl.int64,
    stride_lh: tl.int64,
    IS_CAUSAL: tl.constexpr,
    CROSSES: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    """out and lse of (B, N, H, D) queries over all branches, written once.

    tiles: (num_tiles, 4) document start, document length, first position in it, positions in the tile.
    branches: (num_branches, 2) segment length and rate.
    phases: (num_branches, H // PACK), -1 if the heads do not run the branch.
    CROSSES: some tile has rows of several segments of a branch.
    """
    i_t = tl.program_id(0) % num_tiles
    i_h = tl.program_id(0) // num_tiles
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
    p_k = k + i_b * stride_kb + i_kg * stride_kg + document * stride_kn
    p_v = v + i_b * stride_vb + i_kg * stride_vg + document * stride_vn

    # [BM, BD]
    b_q = load_rows(q + i_b * stride_qb + i_qh * stride_qh, o_n * stride_qn + o_h * stride_qh, m_t, True, D, BD)
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_out = tl.zeros([BM, BD], tl.float32)
    for i_w in range(num_branches):
        width = tl.load(branches + i_w * 2)
        rate = tl.load(branches + i_w * 2 + 1)
        phase = tl.load(phases + (i_w * num_kv_heads + i_g) * num_packs + i_c)
        for i_s in range(first // width, (first + (count - 1) * step) // width + 1):
            start = i_s * width
            stop = tl.minimum(start + width, length)
            full, end = visit_query_tile(first, step, count, start, stop, phase, rate, IS_CAUSAL, BN)
            b_last = o_t * 0 + end - 1
            if IS_CAUSAL:
                b_last = (o_t - start - phase) // rate
            if CROSSES:
                b_last = tl.where((o_t >= start) & (o_t < stop), b_last, -1)
            o_k = (start + phase).to(tl.int64)
            # fmt: off
            b_max, b_sum, b_out = attend(
                b_q, b_last, p_k + o_k * stride_kn, p_v + o_k * stride_vn, rate * stride_kn, rate * stride_vn,
                full, end, b_max, b_sum, b_out, scale * LOG2_E, CROSSES, PRECISION, D, BD, BN,
            )
            # fmt: on
    b_out, b_lse = normalized(b_max, b_sum, b_out, lse.dtype.element_ty)
    store_rows(out + i_b * stride_ob + i_qh * stride_oh, o_n * stride_on + o_h * stride_oh, m_t, b_out, False, D, BD)
    tl.store(lse + i_b * stride_lb + i_qh * stride_lh + o_n * stride_ln + o_h * stride_lh, b_lse, mask=m_t)

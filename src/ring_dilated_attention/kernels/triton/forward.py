"""Forward kernels, for one tile or for all branches at once. Names as in `blocks.py`.

q, k, v are strided views; a row is D consecutive numbers. A strip has the HEADS query heads of each position side by
side: its row i is position i // HEADS, head i % HEADS. Offsets of rows are 64-bit.
"""

import triton
import triton.language as tl

from . import blocks
from .blocks import LOG2_E, SIZES, Tables, load_branch, load_rows, offsets, rows_at, store_rows


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, lse: tl.tensor, scale: tl.float32,
    num_strips: tl.int32, num_bundles: tl.int32, num_kv_heads: tl.int32, num_rows: tl.int32, num_keys: tl.int32,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qm: tl.int64,
    stride_kb: tl.int64, stride_kg: tl.int64, stride_kl: tl.int64,
    stride_vb: tl.int64, stride_vg: tl.int64, stride_vl: tl.int64,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_om: tl.int64,
    stride_lb: tl.int64, stride_lh: tl.int64, stride_lm: tl.int64,
    IS_CAUSAL: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """A partial of (B, H, M, D) queries over (B, G, L, D) keys; num_bundles * HEADS query heads share a key/value head.

    With ACCUMULATE, out and lse hold the partial over other keys, and the online softmax starts from this state:
    (max, sum, acc) = (lse, 1, out). With a float64 lse, max is its float32 value, and sum is exp of the rest.
    """
    i_b, i_g, i_h, first, o_x, at = blocks.queries_in_place(num_strips, num_bundles, num_kv_heads, num_rows, HEADS, BM)
    p_k = rows_at(k, stride_kb, stride_kg, stride_kl, i_b, i_g, 0)
    p_v = rows_at(v, stride_vb, stride_vg, stride_vl, i_b, i_g, 0)
    p_out = rows_at(out, stride_ob, stride_oh, stride_om, i_b, i_h, 0)
    p_lse = rows_at(lse, stride_lb, stride_lh, stride_lm, i_b, i_h, 0)
    # [BM, BD]
    b_q = load_rows(rows_at(q, stride_qb, stride_qh, stride_qm, i_b, i_h, 0), at, True, D, BD)
    if ACCUMULATE:
        b_lse = tl.load(p_lse.start + offsets(p_lse, at), mask=at.mask, other=float("-inf")) * LOG2_E
        b_max = b_lse.to(tl.float32)
        b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)  # (-inf) - (-inf) is NaN
        b_sum = tl.exp2((b_lse - b_shift).to(tl.float32))  # exp of what rounding to float32 takes from lse
        b_out = load_rows(p_out, at, True, D, BD).to(tl.float32) * b_sum[:, None]
    else:
        b_max = tl.full([BM], float("-inf"), tl.float32)
        b_sum = tl.zeros([BM], tl.float32)
        b_out = tl.zeros([BM, BD], tl.float32)
    full, end, b_last = blocks.keys_in_place(first, o_x, num_keys, IS_CAUSAL, HEADS, BM, BN)
    b_max, b_sum, b_out = blocks.attend(
        b_q, b_last, p_k, p_v, full, end, b_max, b_sum, b_out, scale * LOG2_E, False, PRECISION, D, BD, BN
    )
    b_out, b_lse = blocks.normalized(b_max, b_sum, b_out, lse.dtype.element_ty)
    store_rows(p_out, at, b_out, False, D, BD)
    tl.store(p_lse.start + offsets(p_lse, at), b_lse, mask=at.mask)


@triton.jit(do_not_specialize=SIZES)
def fused_forward_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, lse: tl.tensor,
    strips: tl.tensor, branches: tl.tensor, phases: tl.tensor, scale: tl.float32,
    num_strips: tl.int32, num_bundles: tl.int32, num_kv_heads: tl.int32, num_branches: tl.int32,
    step: tl.int32, bundle_stride: tl.int32, head_step: tl.int32,
    stride_qb: tl.int64, stride_qn: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kg: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vg: tl.int64,
    stride_ob: tl.int64, stride_on: tl.int64, stride_oh: tl.int64,
    stride_lb: tl.int64, stride_ln: tl.int64, stride_lh: tl.int64,
    IS_CAUSAL: tl.constexpr, CROSSES: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """out and lse of (B, N, H, D) queries over all branches. CROSSES: a strip can have rows of several segments."""
    tables = Tables(strips, branches, phases)
    i_b, i_g, i_c, i_h, strip, o_t, at = blocks.queries_of_strip(
        tables, num_strips, num_bundles, num_kv_heads, step, bundle_stride, head_step, HEADS, BM
    )
    p_k = rows_at(k, stride_kb, stride_kg, stride_kn, i_b, i_g, strip.document)
    p_v = rows_at(v, stride_vb, stride_vg, stride_vn, i_b, i_g, strip.document)
    # [BM, BD]
    b_q = load_rows(rows_at(q, stride_qb, stride_qh, stride_qn, i_b, i_h, 0), at, True, D, BD)
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_out = tl.zeros([BM, BD], tl.float32)
    for i_w in range(num_branches):
        width, rate, phase, i_first, i_end = load_branch(tables, strip, step, i_w, i_g, i_c, num_kv_heads, num_bundles)
        for i_s in range(i_first, i_end):
            p_k_seen, p_v_seen, full, end, b_last = blocks.keys_of_segment(
                p_k, p_v, strip, step, o_t, i_s, width, rate, phase, IS_CAUSAL, CROSSES, BN
            )
            b_max, b_sum, b_out = blocks.attend(
                b_q, b_last, p_k_seen, p_v_seen, full, end, b_max, b_sum, b_out, scale * LOG2_E,
                CROSSES, PRECISION, D, BD, BN,
            )  # fmt: skip
    b_out, b_lse = blocks.normalized(b_max, b_sum, b_out, lse.dtype.element_ty)
    store_rows(rows_at(out, stride_ob, stride_oh, stride_on, i_b, i_h, 0), at, b_out, False, D, BD)
    p_lse = rows_at(lse, stride_lb, stride_lh, stride_ln, i_b, i_h, 0)
    tl.store(p_lse.start + offsets(p_lse, at), b_lse, mask=at.mask)

"""One token with a cache. `token_kernel` computes partials over splits of the cached rows; `merge_kernel` merges them.

A Triton program reads the position of its sequence on the device, so grids are the same for every token. A *unit*, in
these tables, is a rolling buffer with query heads that read it. Only units of the token's phase have work.
"""

import triton
import triton.language as tl

from .blocks import LOG2_E, SIZES, Places, RowView, attend, load_rows, normalized, store_rows

NUM_COLUMNS = tl.constexpr(12)  # of the table of units


@triton.jit(do_not_specialize=[*SIZES, "num_units"])
def token_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, memory: tl.tensor, progress: tl.tensor, lengths: tl.tensor,
    units: tl.tensor, partial_out: tl.tensor, partial_lse: tl.tensor, scale: tl.float32,
    num_units: tl.int32, num_heads: tl.int32, num_branches: tl.int32,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_kb: tl.int64, stride_kg: tl.int64,
    stride_vb: tl.int64, stride_vg: tl.int64, stride_mp: tl.int64, stride_mb: tl.int64,
    HAS_LENGTHS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """The partial over one split of a unit's cached rows. The first split also reads and writes the token's own row.

    units: (num_units, 12) segment length, rate, phase, rows of a segment, capacity and first row of the buffer,
        first query head, step to the next, number of query heads, key/value head, branch, whether it writes the row.
    partial_out, partial_lse: (B, H, num_branches, SPLITS, D) and (B, H, num_branches, SPLITS), written where
        there is work.
    """
    i_s = tl.program_id(0) % SPLITS
    i_u = tl.program_id(0) // SPLITS % num_units
    i_b = (tl.program_id(0) // SPLITS // num_units).to(tl.int64)
    position = tl.load(progress + i_b)
    p_unit = units + i_u * NUM_COLUMNS
    width, rate, phase = tl.load(p_unit), tl.load(p_unit + 1), tl.load(p_unit + 2)
    has_work = position % width % rate == phase
    if HAS_LENGTHS:
        has_work = has_work & (tl.load(lengths + i_b) > 0)
    if has_work:
        capacity, buffer = tl.load(p_unit + 4), tl.load(p_unit + 5)
        first_head, head_step, num_own = tl.load(p_unit + 6), tl.load(p_unit + 7), tl.load(p_unit + 8)
        i_g, branch, writes = tl.load(p_unit + 9), tl.load(p_unit + 10), tl.load(p_unit + 11)
        first_slot = position // width * tl.load(p_unit + 3) % capacity
        num_cached = position % width // rate
        # This split has the cached rows begin..end-1, in whole blocks but for the last.
        share = tl.cdiv(tl.cdiv(num_cached, SPLITS), BN) * BN
        begin = tl.minimum(i_s * share, num_cached)
        end = tl.minimum(begin + share, num_cached)

        o_i = tl.arange(0, BM)
        m_i = o_i < num_own
        o_h = first_head + o_i * head_step
        # [BM, BD]
        b_q = load_rows(RowView(q + i_b * stride_qb, 0, stride_qh), Places(o_h, 0, m_i), True, D, BD)
        b_max = tl.full([BM], float("-inf"), tl.float32)
        b_sum = tl.zeros([BM], tl.float32)
        b_out = tl.zeros([BM, BD], tl.float32)
        p_keys = memory + i_b * stride_mb + buffer * D
        p_values = p_keys + stride_mp
        # The rows that lie before the end of the buffer, and those that wrap to its start.
        slot = first_slot + begin
        num_before = tl.minimum(tl.maximum(capacity - slot, 0), end - begin).to(tl.int32)
        num_after = (end - begin).to(tl.int32) - num_before
        slot_after = tl.maximum(slot - capacity, 0)
        p_own_k = k + i_b * stride_kb + i_g * stride_kg
        p_own_v = v + i_b * stride_vb + i_g * stride_vg
        b_max, b_sum, b_out = attend(
            b_q, o_i * 0 + num_before - 1, RowView(p_keys + slot * D, 0, D), RowView(p_values + slot * D, 0, D),
            num_before // BN * BN, num_before,
            b_max, b_sum, b_out, scale * LOG2_E, False, PRECISION, D, BD, BN,
        )  # fmt: skip
        b_max, b_sum, b_out = attend(
            b_q, o_i * 0 + num_after - 1,
            RowView(p_keys + slot_after * D, 0, D), RowView(p_values + slot_after * D, 0, D),
            num_after // BN * BN, num_after,
            b_max, b_sum, b_out, scale * LOG2_E, False, PRECISION, D, BD, BN,
        )  # fmt: skip
        if i_s == 0:
            b_max, b_sum, b_out = attend(
                b_q, o_i * 0, RowView(p_own_k, 0, D), RowView(p_own_v, 0, D), 0, 1,
                b_max, b_sum, b_out, scale * LOG2_E, False, PRECISION, D, BD, BN,
            )  # fmt: skip
        b_out, b_lse = normalized(b_max, b_sum, b_out, tl.float32)
        o_partial = ((i_b * num_heads + o_h) * num_branches + branch) * SPLITS + i_s
        store_rows(RowView(partial_out, 0, D), Places(o_partial, 0, m_i), b_out, False, D, BD)
        tl.store(partial_lse + o_partial, b_lse, mask=m_i)
        if (i_s == 0) & (writes > 0):  # no program reads this slot: it comes after those of the cached rows
            o_d = tl.arange(0, BD)
            o_slot = (first_slot + num_cached) % capacity * D + o_d
            tl.store(p_keys + o_slot, tl.load(p_own_k + o_d, mask=o_d < D), mask=o_d < D)
            tl.store(p_values + o_slot, tl.load(p_own_v + o_d, mask=o_d < D), mask=o_d < D)


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    partial_out: tl.tensor, partial_lse: tl.tensor, progress: tl.tensor, lengths: tl.tensor,
    branches: tl.tensor, phases: tl.tensor, out: tl.tensor, lse: tl.tensor, num_heads: tl.int32, num_branches: tl.int32,
    HAS_LENGTHS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
) -> None:  # fmt: skip
    """out (B, H, D) and lse (B, H) of a head, from its partials in the branches that it reads at this position.

    branches: (num_branches, 2) segment length and rate.
    phases: (num_branches, H), -1 where the head does not run the branch, or no position has its phase.
    """
    i_b = (tl.program_id(0) // num_heads).to(tl.int64)
    i_h = tl.program_id(0) % num_heads
    row = i_b * num_heads + i_h
    position = tl.load(progress + i_b)
    is_new = position >= 0
    if HAS_LENGTHS:
        is_new = tl.load(lengths + i_b) > 0
    o_s, o_d = tl.arange(0, SPLITS), tl.arange(0, BD)
    largest = float("-inf")
    total = 0.0
    b_out = tl.zeros([BD], tl.float32)
    for i_p in range(num_branches):
        width, rate = tl.load(branches + i_p * 2), tl.load(branches + i_p * 2 + 1)
        if is_new & (position % width % rate == tl.load(phases + i_p * num_heads + i_h)):
            o_partial = (row * num_branches + i_p) * SPLITS + o_s
            b_lse = tl.load(partial_lse + o_partial)
            p_partial = partial_out + o_partial[:, None] * D + o_d[None, :]
            # [SPLITS, BD]
            b_partial = tl.load(p_partial, mask=(b_lse > float("-inf"))[:, None] & (o_d < D)[None, :], other=0.0)
            new_largest = tl.maximum(largest, tl.max(b_lse, 0))
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # (-inf) - (-inf) is NaN
            b_p = tl.exp(b_lse - shift)
            fade = tl.exp(largest - shift)
            total = total * fade + tl.sum(b_p, 0)
            b_out = b_out * fade + tl.sum(b_p[:, None] * b_partial, 0)
            largest = new_largest
    covered = total != 0.0
    divisor = tl.where(covered, total, 1.0)
    tl.store(out + row * D + o_d, (b_out / divisor).to(out.dtype.element_ty), mask=o_d < D)
    tl.store(lse + row, tl.where(covered, largest + tl.log(divisor), float("-inf")))

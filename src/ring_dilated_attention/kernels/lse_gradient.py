"""Carry dlse, the gradient of lse, into backward ops that have no argument for dlse.

The ops compute ds = p * (dp - delta) with delta = rowsum(dout * out). A gradient of lse adds p * dlse to ds, which has
the same effect as subtracting dlse from delta. So we add one column to the op's inputs. In this column q, k and v are
0, out is -dlse and dout is 1. Only delta changes, by -dlse.

dlse is float32, and a single column of 16 bits would round it. So 16-bit inputs get three columns, whose products
dout * out add up to -dlse. In all three columns dout is the same power of 2, because -dlse itself may be too large for
float16 (GradScaler begins with 65,536). In out, the first column is -dlse / dout, rounded to 16 bits. The second column
is the rounding error of the first. The third column is the error that remains after the first two. The second and the
third column are rounded too.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .contract import BackwardRows


def dlse_columns(dlse: Tensor, out: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """The columns that are to be appended to dout and to out. Each result has the shape of dlse and a last dim, which
    makes the head dim a multiple of `multiple`. The first column or the first three carry dlse, the rest are 0."""
    count = 1 if out.dtype.itemsize >= 4 else 3
    width = count + -(out.shape[-1] + count) % multiple
    dout_columns = out.new_zeros((*dlse.shape, width))
    out_columns = torch.zeros_like(dout_columns)

    rest = dlse
    factor = torch.ones_like(dlse)
    if count > 1:
        # Keep the exponent between -14 and 15, so that the power of 2 is a normal float16.
        exponent = torch.frexp(rest).exponent.clamp(-14, 15)
        factor = torch.ldexp(factor, exponent)

    dout_columns[..., :count] = factor.unsqueeze(-1)
    for column in range(count):
        out_columns[..., column] = -rest / factor
        rest = rest + factor * out_columns[..., column].to(rest.dtype)
    return dout_columns, out_columns


def with_dlse_columns(rows: BackwardRows, multiple: int = 1) -> BackwardRows:
    """The rows without dlse: dout and out have the columns that carry it, and query, key and value as many columns of
    zeros.

    The caller must pass `scale` to the op, because the op's default is computed from the head dim, which is larger now.
    """
    dout, out = rows.dout, rows.out  # (B, H, M, D), or with the columns already
    if rows.dlse is not None:
        dout_columns, out_columns = dlse_columns(rows.dlse, out, multiple)
        dout = torch.cat((dout, dout_columns), dim=-1)
        out = torch.cat((out, out_columns), dim=-1)

    added = out.shape[-1] - rows.query.shape[-1]
    if added == 0:
        return rows
    query, key, value = (pad(x, (0, added)) for x in (rows.query, rows.key, rows.value))
    return BackwardRows(dout, None, query, key, value, out, rows.lse)

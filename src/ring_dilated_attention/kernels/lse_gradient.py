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
from torch.nn.functional import pad

from .contract import BackwardRows


def num_columns(dtype: torch.dtype) -> int:
    return 1 if dtype.itemsize >= 4 else 3


def with_dlse_columns(rows: BackwardRows, width: int) -> BackwardRows:
    """The rows with `width` new columns. The first one or three of these carry dlse (`num_columns`), the rest are 0.

    The caller must pass `scale` to the op, because the op's default is computed from the head dim, which is larger now.
    """
    assert rows.dlse is not None
    zeros = (0, width)
    head_dim = rows.query.shape[-1]
    out = pad(rows.out, zeros)  # (B, H, M, D + width)
    dout = pad(rows.dout, zeros)

    rest = rows.dlse  # (B, H, M)
    factor = torch.ones_like(rows.dlse)
    count = num_columns(out.dtype)
    if count > 1:
        # Keep the exponent between -14 and 15, so that the power of 2 is a normal float16.
        exponent = torch.frexp(rest).exponent.clamp(-14, 15)
        factor = torch.ldexp(factor, exponent)

    for column in range(head_dim, head_dim + count):
        dout[..., column] = factor.to(out.dtype)
        out[..., column] = (-rest / factor).to(out.dtype)
        rest = rest + factor * out[..., column].to(rest.dtype)

    query, key, value = (pad(x, zeros) for x in (rows.query, rows.key, rows.value))
    return rows._replace(dout=dout, dlse=None, query=query, key=key, value=value, out=out)

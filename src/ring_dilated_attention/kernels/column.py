"""The gradient through lse, for backward ops that take none.

The ops compute ds = p * (dp - delta) with delta = rowsum(dout * out), and a gradient of lse adds p * dlse to ds. One
more column, in which q, k and v are 0, out is -dlse and dout is 1, changes nothing but delta: it becomes delta - dlse.
"""

from torch.nn.functional import pad

from .contract import BackwardRows


def with_dlse_column(rows: BackwardRows, width: int = 1) -> BackwardRows:
    """The rows with `width` more columns, of which the first carries dlse. The scale must be passed on explicitly."""
    assert rows.dlse is not None
    zeros, head_dim = (0, width), rows.query.shape[-1]
    out, dout = pad(rows.out, zeros), pad(rows.dout, zeros)
    out[..., head_dim] = -rows.dlse.to(out.dtype)
    dout[..., head_dim].fill_(1)
    query, key, value = (pad(x, zeros) for x in (rows.query, rows.key, rows.value))
    return rows._replace(dout=dout, dlse=None, query=query, key=key, value=value, out=out)

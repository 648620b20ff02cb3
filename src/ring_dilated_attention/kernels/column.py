"""The gradient through lse, for backward ops that take none.

The ops compute ds = p * (dp - delta) with delta = rowsum(dout * out), and a gradient of lse adds p * dlse to ds. One
more column, in which q, k and v are 0, out is -dlse and dout is 1, changes nothing but delta: it becomes delta - dlse.
"""

from torch import Tensor
from torch.nn.functional import pad


def with_dlse_column(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dlse: Tensor, width: int = 1
) -> tuple[Tensor, ...]:
    """dout, q, k, v, out with `width` more columns (the first carries dlse). The scale must be passed on explicitly."""
    zeros = (0, width)
    out, dout = pad(out, zeros), pad(dout, zeros)
    head_dim = q.shape[-1]
    out[..., head_dim] = -dlse.to(out.dtype)
    dout[..., head_dim].fill_(1)
    return dout, pad(q, zeros), pad(k, zeros), pad(v, zeros), out

"""What stands in the place of a kernel where an executor runs in virtual time."""

from ring_dilated_attention.kernels import cpu


class TimedKernel:
    """The CPU kernel. Before each call, take(query, key, is_causal, number of products) lets its time go by."""

    TRAITS = cpu.TRAITS
    merging = staticmethod(cpu.merging)
    takes_short_rows = staticmethod(cpu.takes_short_rows)

    def __init__(self, take):
        self.take = take

    def forward(self, q, k, v, is_causal, scale):
        self.take(q, k, is_causal, 2)
        return cpu.forward(q, k, v, is_causal, scale)

    def backward(self, rows, is_causal, scale):
        self.take(rows.query, rows.key, is_causal, 5)
        return cpu.backward(rows, is_causal, scale)

"""Predicts the memory of one attention call on one rank, from what its program allocates and frees. No torch.

A figure is a sum over named items, not a formula. It counts what torch's allocator gives out. `kernels/traits.py` says
what a kernel takes beside its results. Not counted: the columns that a gradient of lse needs
(`kernels/lse_gradient.py`), and what the transport allocates.
"""

from typing import NamedTuple

from ..plan import step as steps
from ..plan.dealing import Dealing
from ..plan.plan import Plan
from ..plan.program import make_program
from ..plan.sizes import Sizes, Traits


class Item(NamedTuple):
    """Something that is held at the peak."""

    name: str
    num_bytes: int


class Peak(NamedTuple):
    """The items that are held at the moment of the largest total, the largest item first."""

    items: tuple[Item, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


class AttentionMemory(NamedTuple):
    """The peak of a forward alone, and of a forward with its backward. Both include the rank's query, key and value."""

    forward: Peak
    forward_backward: Peak


def attention_memory(plan: Plan, sizes: Sizes, traits: Traits, dealing: Dealing | None = None) -> AttentionMemory:
    """The memory of one call on the plan's rank. If heads are dealt, the plan is that of the dealt heads."""
    terms = steps.Terms(
        rounds=sizes.itemsize < sizes.sum_itemsize and traits.packing is None,
        batch=sizes.batch,
        dealing=dealing,
        packing=traits.packing,
        distances=(row_bytes("query", plan, sizes), row_bytes("key", plan, sizes)),
        itemsize=sizes.itemsize,
        is_brief=True,  # two of many equal calls show the peak: the second runs while the first's results are held
    )
    ledger = _Ledger(plan, sizes, terms, traits)
    ledger.give("query", "key", "value")
    ledger.add_up("forward")
    forward = ledger.peak
    ledger.give("dout")
    ledger.add_up("backward")
    return AttentionMemory(forward, ledger.peak)


def row_bytes(name: str, plan: Plan, sizes: Sizes) -> int:
    """Bytes that one position takes, over all heads, in the tensor of this name."""
    num_heads = plan.num_kv_heads if name in ("key", "value", "dk", "dv") else plan.num_heads
    has_numbers = name in ("lse", "dlse")  # one for each row and head
    return num_heads * (sizes.sum_itemsize if has_numbers else sizes.head_dim * sizes.itemsize)


class _Ledger:
    """The bytes that are held now, by name, and those that were held at the largest total."""

    def __init__(self, plan: Plan, sizes: Sizes, terms: steps.Terms, traits: Traits) -> None:
        self.plan, self.sizes, self.terms, self.traits = plan, sizes, terms, traits
        self.held: dict[str, int] = {}
        self.now = self.largest = 0
        self.at_peak: dict[str, int] = {}
        self.results: dict[str, int] = {}  # of the last tile

    def hold(self, name: str, num_bytes: int) -> None:
        self.now += num_bytes - self.held.get(name, 0)
        self.held[name] = num_bytes
        if self.now > self.largest:
            self.largest, self.at_peak = self.now, dict(self.held)

    @property
    def peak(self) -> Peak:
        items = (Item(*item) for item in self.at_peak.items() if item[1])
        return Peak(tuple(sorted(items, key=lambda item: -item.num_bytes)))

    def let_go(self, name: str) -> None:
        self.now -= self.held.pop(name, 0)

    def pass_by(self, name: str, num_bytes: int) -> None:
        """Count bytes that a step allocates and frees again."""
        if self.now + num_bytes > self.largest:
            self.hold(name, num_bytes)
            self.let_go(name)

    def give(self, *names: str) -> None:
        """Count tensors that the caller holds."""
        for name in names:
            self.hold(self.given(name), self.tensor(name, is_dealt=False))

    def given(self, name: str) -> str:
        """The name of the item of this rank's own rows. If heads are dealt, `name` is the item of the dealt heads."""
        return name if self.terms.dealing is None else f"{name}, own rows"

    def add_up(self, stage: str) -> None:
        for step in make_program(self.plan, stage, self.terms):
            getattr(self, type(step).__name__.lower())(step)

    def tensor(self, name: str, *, is_dealt: bool = True) -> int:
        """Bytes of a whole tensor that the program names. lse counts in the dtype in which it is returned."""
        rows, share = self.plan.num_rows, 1
        if self.terms.dealing is not None and not is_dealt:
            rows, share = self.terms.dealing.lengths[self.terms.dealing.place], self.terms.dealing.size
        return self.sizes.batch * rows * share * row_bytes(name, self.plan, self.sizes)

    def summed(self, num_bytes: int) -> int:
        """The bytes of the same elements in the dtype of sums."""
        return num_bytes // self.sizes.itemsize * self.sizes.sum_itemsize

    def wide(self, num_bytes: int) -> int:
        """The bytes of the same lse in float64, the dtype in which partials are merged."""
        return num_bytes // self.sizes.sum_itemsize * 8

    # From here on, one method for each type of step, with its name.

    def deal(self, step: steps.Deal) -> None:
        """Hold copies of the rows to send, then the rows received, then the tensor that is made of these."""
        own, dealt = self.tensor(step.name, is_dealt=False), self.tensor(step.name)
        leaves, comes = (own, dealt) if step.to_heads else (dealt, own)
        self.hold("dealt heads", leaves + comes)
        self.hold("dealt heads", comes)
        self.hold(step.name if step.to_heads else self.given(step.name), comes)
        self.let_go("dealt heads")
        if not step.to_heads:
            self.let_go(step.name)

    def pack(self, step: steps.Pack) -> None:
        self.hold(step.name, step.size * self.sizes.unit * self.sizes.itemsize)

    def take(self, step: steps.Take) -> None:
        itemsize = self.sizes.sum_itemsize if step.is_sum else self.sizes.itemsize
        self.hold(step.name, step.size * self.sizes.unit * itemsize)

    def free(self, step: steps.Free) -> None:
        for name in step.names:
            self.let_go(name)

    def start(self, step: steps.Start) -> None:
        self.hold(step.name, self.summed(self.tensor(step.name)))
        if step.name == "out":
            self.hold("lse", self.wide(self.tensor("lse")))

    def compute(self, step: steps.Compute) -> None:
        query, key, width = step.tile.query, step.tile.key, self.sizes.head_dim * self.sizes.sum_itemsize
        segments = query.segments * (self.sizes.batch if step.entry is None else 1)
        rows = segments * len(query.heads) * query.num_rows
        keys = segments * len(key.heads) * key.num_rows
        copies = [keys if name in ("key", "value") else rows for name in step.copied]
        self.hold("copied rows of one tile", width * sum(copies))
        width = self.sizes.head_dim * self.sizes.itemsize if self.terms.rounds else width
        if step.what == "partial":
            self.results = {"out": rows * width, "lse": rows * self.sizes.sum_itemsize}
        else:
            self.results = {"dq": rows * width, "dk": keys * width, "dv": keys * width}
        self.hold("results of one tile", sum(self.results.values()))
        self.pass_by("kernel scratch", self.traits.scratch(step, self.sizes, self.plan.num_heads))
        self.let_go("copied rows of one tile")

    def merge(self, step: steps.Merge) -> None:
        out, lse = self.results["out"], self.results["lse"]
        if step.how == "adopt":
            self.hold("results of one tile", lse)
            self.hold("out", out)
            self.hold("lse", self.wide(lse))
        elif step.how == "merge":  # as `run/merge.py` does: the weight, and copies where dtypes differ
            copy = 0 if self.wide(lse) == lse else lse
            cast = self.summed(out) if self.terms.rounds else 0
            self.pass_by("merging", self.wide(lse) + max(copy + cast, self.wide(lse) + 2 * copy))
        self.let_go("results of one tile")

    def add(self, step: steps.Add) -> None:
        made = self.results[step.name]
        if step.how == "add" and self.terms.rounds:
            self.pass_by("adding", self.summed(made))
        self.results[step.name] = 0
        self.hold("results of one tile", sum(self.results.values()))
        if step.how == "adopt":
            self.hold(step.name, made)

    def finish(self, step: steps.Finish) -> None:
        if step.name == "lse" or self.sizes.itemsize < self.sizes.sum_itemsize:
            self.pass_by("result in its dtype", self.tensor(step.name))
        self.hold(step.name, self.tensor(step.name))

    def nothing(self, step: steps.Step) -> None:
        """The step allocates and frees nothing."""

    post = wait = zero = home = nothing

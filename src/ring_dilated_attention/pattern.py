"""Which query attends to which key: branches, phases and causality (LongNet, arXiv 2307.02486, section 2). Pure
integers, no torch.

A branch is a pair (segment length w, dilation rate r). Position t of a document lies in segment t // w of the branch
and has phase (t mod w) mod r. Each query head reads one phase of the branch. Query i of this head sees (attends to) key
j if i and j lie in the same segment and both have the phase that the head reads. A causal pattern also requires j <= i.
If query i sees key j in two branches, the key counts twice in the softmax.

A sliding window of w positions is an additional branch, without phases. In a causal pattern query i sees positions
i - w + 1 to i. In a pattern that is not causal, query i sees all positions that are at most w // 2 away.

`Branch.in_reach` tests segments, windows and causality for two positions. `plan/sight.py` tests them for ranges of
positions.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from numbers import Real
from operator import index
from typing import Any, NamedTuple

PHASE_RULES = ("modulo", "blocked")
HEAD_RULES = ("all", "split")

# As a segment length, this number means the whole document. No sequence has as many positions, and the number fits into
# int64.
WHOLE_DOCUMENT = 2**62
_MOST_LISTED = 8  # `explain` lists the phases of a branch in full if there are at most this many


class Branch(NamedTuple):
    """One (segment_length w, dilation_rate r) pair, or a sliding window of w positions (r = 1)."""

    segment_length: int
    dilation_rate: int
    is_window: bool = False

    def in_reach(self, query: Any, key: Any, *, is_causal: bool) -> Any:
        """Whether a query and a key at these positions of a document lie in one segment, or in the window. If causal,
        the key must not follow the query. Positions are numbers, or tensors of shapes that broadcast."""
        if self.is_window:
            seen = abs(query - key) <= self.window_reach(is_causal=is_causal)
        else:
            seen = query // self.segment_length == key // self.segment_length
        return seen & (key <= query) if is_causal else seen

    def window_reach(self, *, is_causal: bool) -> int:
        """How many positions a window reaches back. If it is not causal, it reaches equally far forward."""
        return self.segment_length - 1 if is_causal else self.segment_length // 2

    def __str__(self) -> str:
        if self.is_window:
            return f"a sliding window of {self.segment_length}"
        length = "whole document" if self.segment_length == WHOLE_DOCUMENT else self.segment_length
        return f"w={length}, r={self.dilation_rate}"


class HeadGroup(NamedTuple):
    """Query heads whose rows can be read through one strided view, and the key/value heads that they attend to.

    If phase_step is 0, all heads of the group read the same phase. If it is 1, the group is a *diagonal*: the phase of
    each head is one higher than the phase of the previous head.
    """

    query_heads: range
    kv_heads: range  # The j-th query head reads kv_heads[j // (len(query_heads) // len(kv_heads))].
    phase: int  # The j-th query head reads the phase `phase + j * phase_step`.
    # 0: all heads read the same phase. 1: each head reads the next phase (a diagonal).
    phase_step: int

    @property
    def phases(self) -> range:
        """The phases that the heads of the group read: a single phase, or on a diagonal one phase for each head."""
        num_phases = len(self.query_heads) if self.phase_step else 1
        return range(self.phase, self.phase + num_phases)


HeadGroups = tuple[HeadGroup, ...]


@dataclass(frozen=True)
class DilatedPattern:
    """The attention pattern: all branches, the phase rule and causality. Hashable.

    `DilatedPattern.longnet` makes branches by the paper's rule. `DilatedPattern.dense` makes dense attention, and
    `DilatedPattern.sliding` a sliding window without other branches.

    Args:
        segment_lengths: the segment length w of each branch, in positions. The sequence length need not be a multiple
            of w.
        dilation_rates: the dilation rate r of each branch.
        window: the length of a sliding window, which all heads run as an additional branch; None for no window. In a
            causal pattern a query attends to the last `window` positions, including its own (Mistral, Gemma). Otherwise
            it attends to all positions at most `window // 2` away (ModernBERT).
        is_causal: whether a query attends only to its own and earlier positions.
        phase: the rule that gives head h of H heads its phase. "modulo": phase h mod r, as in the paper. "blocked":
            phase h // ceil(H / r), as in torchscale.
        heads: "all" runs every branch on every head (LongNet). "split" cuts the heads into contiguous groups of
            near-equal sizes, as torch.tensor_split does, and runs branch i on group i only. All heads of group i read
            phase i mod r.

    Raises:
        ValueError: for lists that are empty (without a window) or of different lengths, entries that are not integers
            from 1 to 2**62, rules that do not exist, and a window with heads="split".
    """

    segment_lengths: Sequence[int]  # Stored as a tuple, like dilation_rates.
    # Default to (), so that a call without rates gets the ValueError below, which says what is missing, and not a
    # TypeError.
    dilation_rates: Sequence[int] = ()
    _: KW_ONLY
    window: int | None = None
    is_causal: bool = False
    phase: str = "modulo"
    heads: str = "all"

    def __post_init__(self) -> None:
        if self.window is not None:
            (window,) = _integers("window", [self.window])
            object.__setattr__(self, "window", window)
        for name in ("segment_lengths", "dilation_rates"):
            entries = _integers(name, getattr(self, name), may_be_empty=self.window is not None)
            object.__setattr__(self, name, entries)
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise ValueError(
                f"segment_lengths has {len(self.segment_lengths)} entries and dilation_rates has "
                f"{len(self.dilation_rates)}: {self.segment_lengths} and {self.dilation_rates}. "
                "A branch is one pair, so give as many rates as lengths."
            )
        if not isinstance(self.is_causal, bool):
            raise ValueError(f"is_causal must be True or False, got {self.is_causal!r}.")
        for name, rule, rules in (
            ("phase", self.phase, PHASE_RULES),
            ("heads", self.heads, HEAD_RULES),
        ):
            if rule not in rules:
                raise ValueError(f"{name}={rule!r} is unknown; choose one of {rules}.")
        if self.heads == "split" and self.phase != "modulo":
            raise ValueError(
                f"heads='split' has its own phase rule (branch i reads phase i mod r), got phase={self.phase!r}. Leave "
                "`phase` at its default."
            )
        if self.heads == "split" and self.window is not None:
            raise ValueError(
                "heads='split' gives each branch its own heads, but a window belongs to all heads, got "
                f"window={self.window}. Leave `heads` at its default."
            )
        _ = self.text  # compute the text now, because torch.compile cannot trace the computation

    @cached_property
    def text(self) -> str:
        """The pattern as a JSON string, from which `from_text` makes the pattern again. PyTorch's custom ops take
        strings, but not patterns.

        The text is not a field. FSDP copies a dataclass in a module's inputs: it calls the constructor with all fields
        as arguments, and the constructor takes no text.
        """
        return json.dumps(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, with tuples as lists. The call `DilatedPattern(**fields)` makes an equal pattern."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def dense(cls, *, is_causal: bool = False) -> "DilatedPattern":
        """Dense attention of any length: one branch at rate 1, whose segment is the whole document."""
        return cls((WHOLE_DOCUMENT,), (1,), is_causal=is_causal)

    @classmethod
    def sliding(cls, window: int, *, is_causal: bool = False) -> "DilatedPattern":
        """A sliding window of `window` positions, and no other branch.

        If is_causal, a query attends to the last `window` positions, including its own. Otherwise it attends to all
        positions at most `window // 2` away.
        """
        return cls((), (), window=window, is_causal=is_causal)

    @classmethod
    def longnet(
        cls,
        max_len: int,
        *,
        first_length: int = 2048,
        ratio: int = 2,
        window: int | None = None,
        is_causal: bool = False,
        phase: str = "modulo",
        heads: str = "all",
    ) -> "DilatedPattern":
        """LongNet's rule: segment lengths and rates grow alike, w_i = w_0 * a**i and r_i = a**i, up to max_len.

        In branch i a segment has w_0 rows of each phase, and a head reads one phase. One of every a**i queries attends
        to these w_0 keys, the others attend to none: w_0 / a**i keys per query on average. Summed over the branches,
        these are fewer than w_0 * a / (a - 1) keys. So the work is linear in the length (arXiv 2307.02486, section
        2.4).

        The paper's experiments (section 4.1) do not follow this rule: lengths (2048, 4096, 8192, 16384, 32768) have the
        rates (1, 2, 4, 6, 12). For these rates, call `DilatedPattern` itself.

        If a branch has more phases than there are heads, some phases are read by no head. `explain` lists these phases.

        The start of a long segment is usually also the start of a segment in every branch with shorter segments. In a
        causal pattern, a query right after such a start attends to few keys. With a `window` this query also attends to
        keys before the start.

        Args:
            max_len: the longest segment length; a longer sequence has several such segments.
            first_length: w_0, the segment length of the branch at rate 1. If first_length >= max_len, the pattern has
                only this branch.
            ratio: a, the common ratio of lengths and rates. The last length is cut to max_len. The last rate is a power
                of `a` even then.
            window, is_causal, phase, heads: as in `DilatedPattern`.

        Raises:
            ValueError: if max_len, first_length or window is not an integer of at least 1, or ratio not an integer of
                at least 2.
        """
        for name, number, least in (
            ("max_len", max_len, 1),
            ("first_length", first_length, 1),
            ("ratio", ratio, 2),
        ):
            if not is_integer(number) or number < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}.")
        max_len = index(max_len)
        first_length = index(first_length)
        ratio = index(ratio)
        rates = [1]
        while first_length * rates[-1] < max_len:
            rates.append(rates[-1] * ratio)
        lengths = [min(first_length * rate, max_len) for rate in rates]
        return cls(lengths, rates, window=window, is_causal=is_causal, phase=phase, heads=heads)

    def __repr__(self) -> str:
        if self == DilatedPattern.dense(is_causal=self.is_causal):
            return f"DilatedPattern.dense(is_causal={self.is_causal})"
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.window is None:
            del values["window"]
        listed = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return f"{type(self).__name__}({listed})"

    @property
    def branches(self) -> tuple[Branch, ...]:
        """One branch for each segment length, then the window, if the pattern has one."""
        branches = tuple(map(Branch, self.segment_lengths, self.dilation_rates))
        return branches if self.window is None else (*branches, Branch(self.window, 1, True))

    @classmethod
    @lru_cache(maxsize=256)
    def from_text(cls, text: str) -> "DilatedPattern":
        """The pattern that has this `text`."""
        return cls(**json.loads(text))

    def check_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Raise ValueError unless the pattern can run on this many query and key/value heads."""
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"{num_heads} query heads cannot share {num_kv_heads} key/value heads: "
                f"{num_heads} mod {num_kv_heads} is not 0. The first number must be a multiple of the second."
            )
        if self.heads == "split" and len(self.branches) > num_heads:
            raise ValueError(
                f"heads='split' gives each of {len(self.branches)} branches its own heads, but there are only "
                f"{num_heads} heads. Use fewer branches, more heads, or heads='all'."
            )

    def heads_of(self, branch: int, num_heads: int) -> range:
        """The query heads that run this branch: all of them, or under heads="split" the branch's own group."""
        if self.heads == "all":
            return range(num_heads)
        size, larger = divmod(num_heads, len(self.branches))
        start = branch * size + min(branch, larger)
        return range(start, start + size + (branch < larger))

    def phase_of(self, branch: int, head: int, num_heads: int) -> int | None:
        """The phase that a query head reads in a branch, or None if the head does not run the branch."""
        rate = self.branches[branch].dilation_rate
        if head not in self.heads_of(branch, num_heads):
            return None
        if self.heads == "split":
            return branch % rate
        return head % rate if self.phase == "modulo" else head // -(-num_heads // rate)

    def head_groups(
        self, branch: int, num_heads: int, num_kv_heads: int, held: range | None = None
    ) -> HeadGroups:
        """The query heads that run a branch, cut into as few strided views as possible.

        Heads that read the same phase form one view. Heads that read consecutive phases form one view too, a diagonal:
        the first row of each head is one position after the first row of the previous head. If query heads share
        key/value heads, there are no diagonals.

        Args:
            held: the query heads of the layer that the tensors hold (tensor parallelism); None for all. Of the query
                heads that share a key/value head, `held` contains all or none. In the returned groups, head held.start
                has the number 0. Which phase a head reads depends on the head's number in the layer.
        """
        rate = self.branches[branch].dilation_rate
        groups = self.phase_groups(branch, num_heads, num_kv_heads, held)
        if self.heads == "all" and num_heads == num_kv_heads:
            block = -(-num_heads // rate)  # how many heads read a phase under the blocked rule
            if self.phase == "modulo":
                diagonal = [range(k, min(k + rate, num_heads)) for k in range(0, num_heads, rate)]
            else:
                diagonal = [range(k, num_heads, block) for k in range(block)]
            diagonals: list[HeadGroup] = []
            for heads in diagonal:
                phase, held_heads = _within(heads, held)
                if held_heads:
                    diagonals.append(HeadGroup(held_heads, held_heads, phase, 1))
            return min(groups, tuple(diagonals), key=len)
        return groups

    def phase_groups(
        self, branch: int, num_heads: int, num_kv_heads: int, held: range | None = None
    ) -> HeadGroups:
        """The query heads that run a branch, in groups that read the same phase.

        Within a group, each key/value head is shared by equally many query heads. held: as in `head_groups`.
        """
        groups: list[HeadGroup] = []
        for phase, heads in self._heads_by_phase(branch, num_heads):
            _, held_heads = _within(heads, held)
            groups += _aligned(held_heads, phase, num_heads // num_kv_heads)
        return tuple(groups)

    def _heads_by_phase(self, branch: int, num_heads: int) -> list[tuple[int, range]]:
        """The phases that query heads read in a branch, each with the heads that read it."""
        rate = self.branches[branch].dilation_rate
        if self.heads == "split":
            return [(branch % rate, self.heads_of(branch, num_heads))]
        if self.phase == "modulo":
            return [(s, range(s, num_heads, rate)) for s in range(min(rate, num_heads))]
        block = -(-num_heads // rate)
        return [
            (s, range(h, min(h + block, num_heads)))
            for s, h in enumerate(range(0, num_heads, block))
        ]

    def cache_rows(self, num_heads: int, num_kv_heads: int, max_len: int | None = None) -> int:
        """How many rows of keys a cache of this pattern must hold for one sequence. The number of rows of values is the
        same.

            sum over branches (w, r), key/value heads and the phases s that their query heads read
                of ceil((min(w, max_len) - s) / r)

        Each term of the sum is the size of one buffer. A buffer belongs to one branch, one key/value head and one
        phase. It holds the rows to which the current or a later query can still attend. The size does not grow with the
        sequence.

        Args:
            max_len: the length of the longest sequence; None if that length is not known.

        Raises:
            ValueError: if the pattern is not causal, or cannot run on these heads.
        """
        self.check_heads(num_heads, num_kv_heads)
        if not self.is_causal:
            raise ValueError(
                "a cache needs a causal pattern (no query sees a later key): make it with is_causal=True."
            )
        num_rows = 0
        for i, (w, r, _) in enumerate(self.branches):
            length = w if max_len is None else min(w, max_len)
            for group in self.phase_groups(i, num_heads, num_kv_heads):
                num_rows += len(group.kv_heads) * max(0, -((group.phase - length) // r))
        return num_rows

    def without_keys(self, num_heads: int, lengths: Sequence[int] | None = None) -> tuple[int, int]:
        """How many (query, head) pairs attend to no key, and how many pairs were checked.

        In a branch, a query attends to keys only if its position has the phase that the head reads. A query that
        attends to no key in any branch has out = 0.

        Args:
            lengths: the lengths of the documents. The default is one document, as long as the period of the pattern.
                After one period, the phases of all branches repeat. If the period is very long, only the first
                positions of each document are checked: 2^20 positions, or fewer if heads read more than 64 combinations
                of phases.
        """
        if self.window is not None:  # in a window every query attends to its own position
            return 0, num_heads * sum(lengths if lengths is not None else [1])
        longest = max(lengths) if lengths is not None else math.inf
        # The phase (t mod w) mod r repeats after r positions if r divides w, or if no document is longer than w.
        # Otherwise the phase repeats after w positions.
        period = math.lcm(*(w if w % r and w < longest else r for w, r, _ in self.branches))
        branches = range(len(self.branches))
        heads = Counter(
            tuple(self.phase_of(i, h, num_heads) for i in branches) for h in range(num_heads)
        )
        most = min(2**20, max(2**10, 2**26 // len(heads)))
        lengths = [period] if lengths is None else lengths
        if period > most:
            lengths = [min(length, most) for length in lengths]
        num_periods = sum(length // period for length in lengths)
        rests = sorted(length % period for length in lengths)
        count = 0
        for phases, num_alike in heads.items():
            seen = self._seen(phases, min(period, max(lengths)))
            unseen = accumulate(seen.count(0, a, b) for a, b in pairwise([0, *rests]))
            count += num_alike * (num_periods * seen.count(0) + sum(unseen))
        return count, num_heads * sum(lengths)

    def _seen(self, phases: Iterable[int | None], length: int) -> bytearray:
        """For each position, 1 if a query there attends to any key, else 0. phases: what the head reads in each
        branch."""
        seen = bytearray(length)
        for (w, r, _), phase in zip(self.branches, phases, strict=True):
            if phase is not None:
                # If r divides w, position t has the phase t mod r in every segment. So treat the document as one
                # segment.
                segment = w if w % r else length
                for start in range(0, length, segment):
                    rows = range(start + phase, min(start + segment, length), r)
                    seen[rows.start : rows.stop : r] = b"\1" * len(rows)
        return seen

    def explain(self, num_heads: int, lengths: Sequence[int] | None = None) -> str:
        """One line per branch: which heads read which phases, and which phases no head reads.

        If some queries attend to no key, a last line gives the fraction of these queries.

        lengths: the lengths of the documents, as in `without_keys`.
        """
        self.check_heads(num_heads, num_heads)
        lines = []
        for i, branch in enumerate(self.branches):
            if branch.is_window:
                lines.append(f"branch {i} ({branch}): all {num_heads} heads")
                continue
            heads = self.heads_of(i, num_heads)
            phases = range(min(branch.segment_length, branch.dilation_rate))
            read = [s for s, found in self._heads_by_phase(i, num_heads) if found]
            share = (
                f"heads {heads.start}..{heads.stop - 1}"
                if self.heads == "split"
                else f"all {num_heads} heads"
            )
            note = "; every phase is read"
            there = [s for s in read if s in phases]
            # Compare lengths, because a list of all `phases` may be too large for memory.
            if len(there) < len(phases):
                is_split = self.heads == "split" and there
                unread = f"all but {there[0]}" if is_split else _shorten(phases[len(there) :])
                note = f"; phases that no head reads: {unread}"
            if branch.dilation_rate > branch.segment_length:
                note += "; r > w: a segment has one row of a phase at most, so that a query sees only itself"
            lines.append(f"branch {i} ({branch}): {share} read phases {_shorten(read)}{note}")
        without, pairs = self.without_keys(num_heads, lengths)
        if without:
            which = (
                f"the first {pairs:,}"
                if lengths is not None and pairs < num_heads * sum(lengths)
                else "all"
            )
            lines.append(
                f"{without / pairs:.1%} of {which} (query, head) pairs are in no branch: no key, and out is 0"
            )
        return "\n".join(lines)


def _integers(name: str, values: Iterable[int], *, may_be_empty: bool = False) -> tuple[int, ...]:
    try:
        entries = tuple(values)
    # `values` cannot be iterated over: a number, or a numpy array without dimensions
    except TypeError:
        entries = None
    if entries is None or isinstance(values, (str, bytes, Mapping, Set)):
        raise ValueError(f"{name} must be a list of positive integers, got {values!r}.")
    if not entries and not may_be_empty:
        raise ValueError(
            f"{name} is empty. Give one entry per branch; dense attention is DilatedPattern.dense()."
        )
    for entry in entries:
        if not is_integer(entry):
            text = f"{name} must hold integers, got {entry!r} in {list(entries)}."
            if isinstance(entry, Sequence):
                text += " Lengths and rates are two lists: DilatedPattern([2048, 4096], [1, 2])."
            raise ValueError(text)
        if entry < 1:
            raise ValueError(f"{name} must be at least 1, got {entry} in {list(entries)}.")
        if entry > WHOLE_DOCUMENT:
            raise ValueError(
                f"{name} must be at most 2**62 = {WHOLE_DOCUMENT}, got {entry}: no sequence is that long."
            )
    return tuple(index(entry) for entry in entries)


def why_no_pattern(value: object) -> str | None:
    """An error message if a value is not a DilatedPattern, else None."""
    if isinstance(value, DilatedPattern):
        return None
    return (
        f"pattern must be a DilatedPattern, got {value!r}. DilatedPattern(segment_lengths=[2048, 4096], "
        "dilation_rates=[1, 2]) makes one"
    )


def is_integer(value: object) -> bool:
    """Whether a value is an integer and not a bool. Integers of numpy and torch count too."""
    try:
        index(value)  # type: ignore[arg-type]  # raises TypeError for other types
    except TypeError:
        return False
    return not isinstance(value, bool)


def is_finite_number(value: object) -> bool:
    """Whether a value is a finite real number and not a bool. An integer too large for a float is not finite.

    This does not call math.isfinite, because torch.compile cannot trace that function.
    """
    try:
        return (
            isinstance(value, Real) and not isinstance(value, bool) and abs(float(value)) < math.inf
        )
    except OverflowError:
        return False


def _within(heads: range, held: range | None) -> tuple[int, range]:
    """Keep the heads that are also in `held` (None keeps all), and subtract held.start from their numbers.

    Returns how many of `heads` come before the first kept head, and the new numbers of the kept heads. An example: if
    `heads` are 0, 2, 4, 6 and `held` is range(4, 8), then heads 4 and 6 are kept. Their new numbers are 0 and 2, and
    two heads come before.
    """
    if held is None:
        return 0, heads
    inside = [i for i, head in enumerate(heads) if head in held]
    if not inside:
        return 0, range(0)
    common = heads[inside[0] : inside[-1] + 1]
    return inside[0], range(common.start - held.start, common.stop - held.start, common.step)


def _aligned(heads: range, phase: int, ratio: int) -> list[HeadGroup]:
    """Cut query heads of one phase into groups. In a group, equally many query heads share each key/value head.

    ratio: how many query heads of the layer share a key/value head.
    """
    groups: list[HeadGroup] = []
    for kv_head, sharing in groupby(heads, key=lambda head: head // ratio):
        query_heads = list(sharing)
        first = query_heads[0]
        first_kv = kv_head
        step = 1
        if groups:
            before, kv_before, *_ = groups[-1]
            same_size = len(before) == len(kv_before) * len(query_heads)
            kv_step = kv_head - kv_before[-1]
            if same_size and (len(kv_before) == 1 or kv_before.step == kv_step):
                first = before.start
                first_kv = kv_before.start
                step = kv_step
                groups.pop()
        query_range = range(first, query_heads[-1] + 1, heads.step)
        groups.append(HeadGroup(query_range, range(first_kv, kv_head + 1, step), phase, 0))
    return groups


def _shorten(numbers: Sequence[int]) -> str:
    """Numbers as text: all of them if there are at most 8, else the first four, the last and how many there are."""
    if len(numbers) > _MOST_LISTED:
        return f"{', '.join(map(str, numbers[:4]))}, ... {numbers[-1]} ({len(numbers)} of them)"
    return ", ".join(map(str, numbers)) or "none"

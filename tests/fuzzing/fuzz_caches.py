"""Caches against the definition in float64: however a sequence is appended, its rows are those of one call.

Tokens, slices and ragged batches; positions that are taken back, entries that begin anew, forks, states that are saved
and loaded; all heads of a layer or some of them; plain calls and compiled ones.

What must hold: every row of out and lse within a bound of the definition; padding comes out as nothing and is not read;
what may be taken back is taken back.
Uninitialised memory, the cache's own above all, is NaN.

B batch, N positions of a whole sequence, M rows of one call, H query heads, G key/value heads, D head dim.
"""

import io
import math
from dataclasses import replace

import torch
from fuzz import Trial, broken, nothing
from fuzz_oracle import (
    DTYPES,
    STRIDES,
    Answer,
    answer_to,
    difference,
    draw_call,
    draw_heads,
    tensors_of,
)
from helpers import poisoned_memory
from torch._dynamo.testing import CompileCounterWithBackend

from ring_dilated_attention import DilatedCache, dilated_attention
from ring_dilated_attention.ranks.call import Call as RankCall
from ring_dilated_attention.run import append, dilated_cache

COMPILERS = ["eager", "eager", "aot_eager"]  # inductor takes seconds for a graph
NUM_ACTIONS = 12
MOST_FRAMES = 6  # graphs of one compiled function, each a fraction of a second


def try_case(rng, folder):
    compiler = rng.choice(COMPILERS) if rng.random() < 0.06 else None
    mode = rng.choice([torch.no_grad, torch.no_grad, torch.inference_mode])
    with poisoned_memory(), mode():
        try:
            return try_sequence(rng, compiler)
        finally:
            if compiler is not None:
                torch._dynamo.reset()


def causal(call):
    """As a call with a cache can be: causal, of whole sequences, without a gradient."""
    pattern = replace(call.pattern, is_causal=True)
    return call._replace(pattern=pattern, documents=None, needs_grad="", outputs="both")


def draw_limits(rng, call):
    """max_len and keep; segments that never end need the first."""
    is_endless = any(branch.segment_length > 1000 for branch in call.pattern.branches)
    lengths = [call.seq_len, call.seq_len + rng.randint(1, 9)]
    return {
        "max_len": rng.choice(lengths if is_endless else [None, *lengths]),
        "keep": rng.choice([0, 0, 1, 3, 20]),
    }


class Conversation:
    """What every entry of the batch has been told so far, beside caches that should know it."""

    def __init__(self, rng, compiler):
        self.rng, self.compiler = rng, compiler
        self.call = call = causal(draw_call(rng, dtypes=DTYPES, sinks=True))
        self.limits = draw_limits(rng, call)
        self.heads, own = draw_heads(rng, call)
        heads = range(self.heads.start, self.heads.stop)
        self.held = {}  # what calls and caches are told of their heads
        if len(heads) < call.num_heads or rng.random() < 0.2:
            self.held = {"heads_held": heads}
        self.cache = self.new_cache(call.batch, self.limits)
        inputs, dout, dlse = tensors_of(call)
        with torch.inference_mode(False), torch.enable_grad():
            self.answer = answer_to(call, [x.clone() for x in inputs], dout.clone(), dlse.clone())
        self.inputs = [inputs[0][:, :, self.heads], *(x[:, :, own] for x in inputs[1:])]
        self.sources = list(range(self.call.batch))  # the sequence that each entry goes on with
        self.positions, self.highest = [0] * self.call.batch, [0] * self.call.batch
        self.counter = CompileCounterWithBackend(compiler) if compiler else None
        self.only_tokens = compiler is not None and rng.random() < 0.5
        self.dynamic = rng.choice([None, None, True])
        rules = {"scale": call.scale, "return_lse": True, **self.held}
        if self.held:
            rules["num_heads"] = call.num_heads
        if call.has_sinks:
            rules["sinks"] = call.sinks.detach()[self.heads]

        def attend(q, k, v, cache, lengths):
            return dilated_attention(q, k, v, call.pattern, cache=cache, lengths=lengths, **rules)

        self.attend = attend
        if self.counter is not None:
            options = {"backend": self.counter, "fullgraph": True, "dynamic": self.dynamic}
            self.attend = torch.compile(attend, **options)
        self.said = []

    def new_cache(self, batch, limits):
        call = self.call
        sizes = (call.pattern, batch, call.num_heads, call.num_kv_heads, call.head_dim)
        return DilatedCache(*sizes, dtype=call.dtype, **self.held, **limits)

    @property
    def batch(self):
        return len(self.sources)

    def actions(self):
        if self.only_tokens:
            return [self.append]
        others = [self.crop, self.crop, self.fork, self.load, self.reset]
        return [self.append] * 7 + others

    def append(self):
        """Rows for every entry; of its own number each, if it is ragged. What follows them is NaN."""
        left = [self.call.seq_len - position for position in self.positions]
        most = 1 if self.only_tokens else self.rng.choice([1, 1, 1, 2, 5, 17, 40])
        is_ragged = not self.only_tokens and self.rng.random() < 0.4
        num_new = min(most, max(left) if is_ragged else min(left))
        if num_new == 0:
            return None
        counts = [self.rng.randint(0, min(num_new, n)) if is_ragged else num_new for n in left]
        self.said.append(f"append {counts} of {num_new}")
        spans = list(zip(self.sources, self.positions, counts, strict=True))
        given = []
        for whole in self.inputs:
            x = whole.new_full((self.batch, num_new, *whole.shape[2:]), math.nan)
            for b, (source, start, count) in enumerate(spans):
                x[b, :count] = whole[source, start : start + count]
            given.append(x)
        lengths = None
        if is_ragged:
            lengths = torch.tensor(counts, dtype=self.rng.choice([torch.int64, torch.int32]))
        if self.compiler is None:
            given = [self.rng.choice(STRIDES)(x) for x in given]
        out, lse = self.attend(*given, self.cache, lengths)
        self.positions = [start + count for _, start, count in spans]
        self.highest = list(map(max, self.highest, self.positions))
        return self._why_wrong(out, lse, spans)

    def _why_wrong(self, out, lse, spans):
        def rows_of(x):
            own = x[:, :, self.heads]
            return torch.cat([own[source, start : start + count] for source, start, count in spans])

        is_row = torch.tensor([count for _, _, count in spans])[:, None] > torch.arange(
            out.shape[1]
        )
        found = {"out": out, "lse": lse}
        values, sizes = ({name: rows_of(x[name]) for name in found} for x in self.answer)
        rows = {name: x[is_row] for name, x in found.items()}
        complaint = difference(self.call, rows, Answer(values, sizes))
        is_nothing = self.call.has_sinks or (lse[~is_row] == -torch.inf).all()
        if out[~is_row].any() or not is_nothing:
            complaint = complaint or "padding is not nothing"
        if (found := self.cache.position.tolist()) != self.positions:
            complaint = complaint or f"positions are {found}, and should be {self.positions}"
        return complaint

    def crop(self):
        """What the contract allows must be taken back; more may be refused, and then nothing has changed."""
        pattern, keep = self.call.pattern, self.limits["keep"]
        floors = []
        for high in self.highest:
            if pattern.window is not None and high - keep >= pattern.window:
                floors.append(high - keep)  # the window has dropped rows
            else:
                youngest = max((high // w * w for w in pattern.segment_lengths), default=0)
                floors.append(max(0, min(high - keep, youngest)))
        most = self.positions
        if self.rng.random() >= 0.3:
            pairs = zip(self.positions, floors, strict=True)
            most = [max(0, position - floor) for position, floor in pairs]
        counts = [self.rng.randint(0, n) for n in most]
        self.said.append(f"crop {counts}")
        targets = [position - count for position, count in zip(self.positions, counts, strict=True)]
        must = all(target >= floor for target, floor in zip(targets, floors, strict=True))
        try:
            self.cache.crop(self.rng.choice([counts, torch.tensor(counts)]))
        except ValueError as error:
            return f"crop({counts}) from {self.positions} is refused: {error}" if must else None
        self.positions = targets
        return None

    def fork(self):
        entries = [self.rng.randrange(self.batch) for _ in range(self.rng.randint(1, 3))]
        if self.compiler is not None:  # another batch is another graph
            entries = [self.rng.randrange(self.batch) for _ in range(self.batch)]
        self.said.append(f"fork {entries}")
        before = self.cache
        self.cache = before.fork(self.rng.choice([entries, torch.tensor(entries)]))
        if self.rng.random() < 0.5:  # they share nothing
            before.memory.fill_(math.nan)
            before.reset()
        for name in ("sources", "positions", "highest"):
            setattr(self, name, [getattr(self, name)[entry] for entry in entries])
        return None

    def load(self):
        """A state that goes through a file, into a cache of other limits."""
        limits = {**self.limits, "keep": self.rng.choice([self.limits["keep"], 0, 30])}
        self.said.append(f"load into keep={limits['keep']}")
        file = io.BytesIO()
        torch.save(self.cache.state_dict(), file)
        file.seek(0)
        self.cache = self.new_cache(self.batch, limits)
        self.cache.load_state_dict(torch.load(file, weights_only=True))
        # What can be taken back is what both could.
        self.limits = {**limits, "keep": min(limits["keep"], self.limits["keep"])}
        return None

    def reset(self):
        rows = None
        if self.rng.random() >= 0.3:
            rows = [b for b in range(self.batch) if self.rng.random() < 0.5]
        self.said.append(f"reset {rows}")
        self.cache.reset(rows)
        for b in range(self.batch) if rows is None else rows:
            self.positions[b] = self.highest[b] = 0
        return None


def try_sequence(rng, compiler):
    talk = Conversation(rng, compiler)
    complaint = None
    for _ in range(NUM_ACTIONS):
        if talk.counter is not None and talk.counter.frame_count >= MOST_FRAMES:
            break
        complaint = rng.choice(talk.actions())()
        if complaint:
            break
    # (With dynamic=True torch takes a scale for a symbol at first, and begins anew.)
    most = 2 if talk.dynamic else 1
    if talk.counter is not None and talk.only_tokens and talk.counter.frame_count > most:
        complaint = complaint or f"{talk.counter.frame_count} graphs for tokens alone, not {most}"
    heads = "some heads" if talk.held else "all heads"
    how = f"sequence, {heads}, {f'compiled, {compiler}' if compiler else talk.call.dtype}"
    return Trial(how, f"{talk.call}, {talk.limits}, {talk.held}: {talk.said}", complaint)


_write, _from_text = append.write, RankCall.from_text


def _write_all_but_one(plan, key, value, memory, t):
    _write(plan, key[:, :-1], value[:, :-1], memory, t)


def _unscaled(text):
    return replace(_from_text(text), scale=1.0)


BREAKAGES = {
    "the last row of a chunk is not written": broken("write", _write_all_but_one, append),
    "what was dropped is taken back": broken("check_crop", nothing, dilated_cache),
    "compiled code forgets the scale": broken("from_text", staticmethod(_unscaled), RankCall),
}

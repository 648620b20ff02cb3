"""Calls on simulated ranks against the definition in float64: as `fuzz_calls`, over a ring, cut in any way."""

import functools
import itertools

from fuzz import Trial, broken, nothing
from fuzz_calls import CALL_BREAKAGES, arranged, results
from fuzz_oracle import answer_to, difference, draw_call, tensors_of
from helpers import poisoned_memory

from ring_dilated_attention import dilated_attention, simulate
from ring_dilated_attention.plan.sharding import WITHOUT_DOCUMENTS
from ring_dilated_attention.run import executor


def try_case(rng, folder):
    call = draw_call(rng, sinks=True)
    world_size = rng.choice([1, 2, 2, 3, 4, 5, 8])
    cut = draw_cut(rng, world_size, call.seq_len)
    with poisoned_memory():
        parallel = simulate.all_ranks(world_size, **cut)
        attend = functools.partial(dilated_attention, **call.rules, parallel=parallel)
        inputs, dout, dlse = tensors_of(call)
        found = results(call, arranged(rng, call, inputs), attend, dout, dlse)
        complaint = difference(call, found, answer_to(call, inputs, dout, dlse))
    how = cut.get("sharding") or ", ".join(cut) or "near-equal"
    return Trial(f"{world_size} ranks, {how}", f"{call} over {world_size} ranks, {cut}", complaint)


def draw_cut(rng, world_size, seq_len):
    """Arguments of a context: where shards begin. Some may be empty."""
    how = rng.choice(["", *WITHOUT_DOCUMENTS, "align", "lengths"])
    if how in WITHOUT_DOCUMENTS:
        return {"sharding": how}
    if how == "align":
        return {"align": rng.randint(1, 12)}
    if how == "lengths":
        borders = [0, *sorted(rng.randint(0, seq_len) for _ in range(world_size - 1)), seq_len]
        return {"lengths": tuple(b - a for a, b in itertools.pairwise(borders))}
    return {}


RING_BREAKAGES = {"gradients do not come home": broken("unpack", nothing, executor._Executor)}
BREAKAGES = CALL_BREAKAGES | RING_BREAKAGES

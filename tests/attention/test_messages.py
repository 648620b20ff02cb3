"""Bad input is a ValueError that quotes the value, shows the arithmetic and names the remedy."""

import inspect
import re
from datetime import timedelta
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from ring_dilated_attention import (
    ContextParallel,
    DilatedPattern,
    dilated_attention,
    explain,
    simulate,
)
from ring_dilated_attention.attention.validate import ARGUMENTS_OF_TORCH
from ring_dilated_attention.kernels.choose import BACKENDS
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.models import torchscale_attention
from ring_dilated_attention.pattern import PHASE_RULES
from ring_dilated_attention.plan.exchange import EXCHANGES
from ring_dilated_attention.plan.sharding import SHARDINGS

DENSE = DilatedPattern((8,), (1,), phase="blocked")  # as torchscale's


def refused(call, fragments, end="."):
    """The call raises ValueError, and its message holds every fragment ("one ... another") and ends as a sentence."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert [x for x in fragments.split(" ... ") if x not in message] == [], message
    assert message.endswith(end)


def tensors(query=(1, 8, 4, 16), key=None, value=None, **kwargs):
    return [torch.randn(shape, **kwargs) for shape in (query, key or query, value or key or query)]


def integers(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


@pytest.mark.parametrize(
    ("segment_lengths", "dilation_rates", "rules", "fragments"),
    [
        (
            (8, 16),
            (1,),
            {},
            "segment_lengths has 2 ... dilation_rates has 1 ... (8, 16) and (1,) ... as many",
        ),
        ((), (), {}, "segment_lengths is empty ... dense attention is DilatedPattern.dense()"),
        ((8,), [], {}, "dilation_rates is empty ... one entry per branch"),
        ((8, 0), (1, 2), {}, "segment_lengths must be at least 1 ... got 0 ... [8, 0]"),
        ((8, 16), (1, -2), {}, "dilation_rates must be at least 1 ... got -2 ... [1, -2]"),
        (("8",), (1,), {}, "segment_lengths must hold integers ... got '8'"),
        ((8,), (True,), {}, "dilation_rates must hold integers ... got True"),
        ("8", (1,), {}, "segment_lengths must be a list of positive integers ... got '8'"),
        (
            [(2048, 1), (4096, 2)],
            (),
            {},
            "segment_lengths must hold integers, got (2048, 1) ... two lists: DilatedPattern([2048, 4096], [1, 2])",
        ),
        ({8: 1}, (1,), {}, "segment_lengths must be a list of positive integers ... got {8: 1}"),
        ((8,), (1,), {"is_causal": 1}, "is_causal must be True or False ... got 1"),
        (
            (8,),
            (1,),
            {"phase": "shifted"},
            "phase='shifted' is unknown ... " + " ... ".join(PHASE_RULES),
        ),
        ((8,), (1,), {"heads": "some"}, "heads='some' is unknown ... all ... split"),
        (
            (8,),
            (1,),
            {"heads": "split", "phase": "blocked"},
            "heads='split' has its own phase rule ... phase='blocked' ... Leave",
        ),
    ],
)
def test_patterns(segment_lengths, dilation_rates, rules, fragments):
    """Catches an entry that is taken for another (True for 1, "8" for 8), a zip that drops the longer's rest, and a
    name that is accepted and ignored."""
    refused(lambda: DilatedPattern(segment_lengths, dilation_rates, **rules), fragments)


def test_what_is_a_number():
    """Catches a check of Python's own types, which refuses what an array or a config file gives."""
    numpy = pytest.importorskip("numpy")
    expected = DilatedPattern((8, 16), (1, 2))
    assert DilatedPattern([8, 16], numpy.array([1, 2])) == expected
    assert DilatedPattern(torch.tensor([8, 16]), range(1, 3)) == expected
    assert hash(DilatedPattern(iter([8, 16]), (1, 2))) == hash(expected)
    inputs = tensors()
    quarter = dilated_attention(*inputs, DENSE, scale=0.25)
    for scale in (numpy.float32(0.25), numpy.float64(0.25), Fraction(1, 4)):
        assert torch.equal(dilated_attention(*inputs, DENSE, scale=scale), quarter)


NO_TENSOR = "must be a tensor (batch, seq, heads, head_dim), got {}: torch.as_tensor makes one"
NO_SINKS = "sinks must have one floating-point number for each of the 4 query heads, got torch"
TWO_SHAPES = "query (1, 8, 4, 16) ... key {} ... {}"


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (
            {"query": (8, 4, 16)},
            "query must be (batch, seq, heads, head_dim) ... got 3 dimensions: (8, 4, 16); unsqueeze(0) adds a batch",
        ),
        ({"query": [[[[1.0]]]]}, "query " + NO_TENSOR.format("list")),
        ({"key": None}, "key " + NO_TENSOR.format("NoneType")),
        (
            {"value": (2, 1, 8, 4, 16)},
            "value must be (batch, seq, heads, head_dim) ... 5 dimensions ... (2, 1, 8, 4, 16)",
        ),
        ({"key": (2, 8, 4, 16)}, TWO_SHAPES.format((2, 8, 4, 16), "agree in batch")),
        ({"key": (1, 9, 4, 16)}, TWO_SHAPES.format((1, 9, 4, 16), "self-attention")),
        (
            {"query": (1, 8, 4, 1), "key": (1, 8, 2, 16)},
            "query (1, 8, 4, 1) ... key (1, 8, 2, 16) ... head_dim",
        ),
        (
            {"value": (1, 8, 4, 8)},
            "key (1, 8, 4, 16) ... value (1, 8, 4, 8) ... must have the same shape",
        ),
        (
            {"key": (1, 8, 3, 16)},
            "4 query heads cannot share 3 key/value heads ... 4 mod 3 is not 0 ... multiple",
        ),
        ({"query": (0, 8, 4, 16)}, "query (0, 8, 4, 16) has an empty batch"),
        ({"query": (1, 8, 0, 16)}, "query (1, 8, 0, 16) has an empty ... heads"),
        ({"key": (1, 8, 4, 32)}, TWO_SHAPES.format((1, 8, 4, 32), "head_dim")),
        ({"query": (1, 8, 4, 0)}, "query (1, 8, 4, 0) has an empty ... head_dim"),
        (
            {"key": torch.zeros(1, 8, 4, 16, dtype=torch.float64)},
            "share one dtype ... query has torch.float32 ... key has torch.float64 ... .to()",
        ),
        (
            {"key": torch.zeros(1, 8, 4, 16, device="meta")},
            "share one device ... query has cpu ... key has meta ... .to()",
        ),
        (
            {"query": torch.zeros(1, 8, 4, 16, dtype=torch.int64)},
            "no backend can run this ... float32 ... bfloat16 ... got torch.int64",
        ),
        ({"value": torch.zeros(1, 8, 4, 16).to_sparse()}, "value must be a dense tensor"),
        ({"cu_seqlens": integers(0, 8).to_sparse()}, "cu_seqlens must be a dense tensor"),
        (
            {"cu_seqlens": integers(0, 5, 5, 8)},
            "must increase ... got 5 then 5 ... entries 1 and 2 ... empty documents: cu_seqlens.unique_cons",
        ),
        (
            {"cu_seqlens": integers(0, 6, 3, 8)},
            "must increase ... got 6 then 3 ... entries 1 and 2",
        ),
        ({"cu_seqlens": integers(1, 5, 8)}, "must start at 0 ... [1, 5, 8]"),
        ({"cu_seqlens": integers(0, 5, 7)}, "end at the length of the sequence, 8 ... [0, 5, 7]"),
        ({"cu_seqlens": integers(0)}, "borders (0, ..., N) ... got 1 entries"),
        ({"cu_seqlens": integers(0, 8).to("meta")}, "borders (0, ..., N) ... on meta"),
        ({"cu_seqlens": integers(0, 1, 2, 3, 4, 5, 6, 7)}, "[0, 1, ..., 7] ... 8 entries"),
        (
            {"cu_seqlens": integers(0, 8, dtype=torch.int64)},
            "1-D int32 tensor ... got torch.int64 (2,) ... tensor(...).int()",
        ),
        ({"cu_seqlens": [0, 8]}, "1-D int32 tensor ... got [0, 8] ... torch.tensor("),
        (
            {"query": (2, 8, 4, 16), "cu_seqlens": integers(0, 8)},
            "batch must be 1, got 2 ... Flatten it",
        ),
        ({"scale": "1"}, "scale must be a finite number ... got '1'"),
        ({"scale": 1e39}, "scale=1e+39 is beyond 3.4e+38 ... Pass float64 tensors"),
        ({"scale": float("nan")}, "scale must be a finite number ... got nan"),
        ({"backend": "flash"}, "backend='flash' is unknown ... auto ... " + " ... ".join(BACKENDS)),
        ({"backend": "sdpa"}, "backend='sdpa' serves CUDA tensors, got cpu ... backend='auto'"),
        (
            {"pattern": [(8, 1)]},
            "DilatedPattern, got [(8, 1)]. DilatedPattern(segment_lengths=[2048, 4096], ",
        ),
        ({"sinks": 1.0}, "sinks must be a tensor of 4 numbers, one for each query head, got 1.0"),
        ({"sinks": torch.zeros(2)}, f"{NO_SINKS}.float32 of shape (2,)"),
        ({"sinks": integers(0, 0, 0, 0)}, f"{NO_SINKS}.int32 of shape (4,)"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks are on meta, query is on cpu: move them"),
        ({"parallel": "cp"}, "parallel must be a ContextParallel or None ... got 'cp'"),
        (
            {"pattern": DilatedPattern((8,) * 5, (1,) * 5, heads="split")},
            "5 branches its own heads ... only 4 ... fewer branches, more heads, or heads='all'",
        ),
    ],
)
def test_calls(arguments, fragments):
    """Catches what torch would broadcast, cast, or refuse in words of its own; borders that would drop tokens or mix
    documents; a backend that falls back in silence. A tuple is a tensor of that shape."""
    given = {"query": (1, 8, 4, 16), "pattern": DENSE, **arguments}
    given.setdefault("key", given["query"])
    given.setdefault("value", given["key"])
    for name in ("query", "key", "value"):
        if isinstance(given[name], tuple):
            given[name] = torch.randn(given[name])
    refused(lambda: dilated_attention(**given), fragments)
    if arguments.keys() <= {"query", "key", "value", "pattern"}:
        refused(lambda: explain(**given), fragments)
        if not isinstance(arguments.get("pattern"), DilatedPattern):
            refused(lambda: torchscale_attention(**given), fragments, end="")


def in_a_module(query, key, value, pattern, **others):
    rows = query.flatten(2)
    return MultiheadDilatedAttention(rows.shape[-1], 4, pattern)(rows, rows, rows, **others)


CALLS = {call.__name__: call for call in (dilated_attention, explain, torchscale_attention)}
CALLS["MultiheadDilatedAttention"] = in_a_module


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "name",
    [
        "is_causal", "softmax_scale", "cu_seqlens_q", "max_seqlen_q", "deterministic", "average_attn_weights",
        "attn_mask", "score_mod", "dropout_p", "enable_gqa", "softcap", "alibi_slopes", "window_size",
        "num_sink_tokens", "chunk",
    ],
)  # fmt: skip
def test_arguments_of_other_functions_are_refused(call, name):
    """Catches one that is accepted and ignored, even if its value asks for nothing; and a hint that is not given."""
    if call == "MultiheadDilatedAttention" and name in ("is_causal", "attn_mask"):
        pytest.skip("the module takes it, as torch's does")
    hint = "" if name == "chunk" else f": {ARGUMENTS_OF_TORCH[name]}"
    for value in (None, False, True):
        with pytest.raises(TypeError) as caught:
            CALLS[call](*tensors(), DENSE, **{name: value})
        assert str(caught.value) == f"{call} has no argument {name!r}{hint}."


def test_every_argument_of_torch_is_taken_or_named():
    """Catches an argument that a newer torch adds to its attention."""
    text = F.scaled_dot_product_attention.__doc__.partition("(")[2].partition(")")[0]
    names = {*re.findall(r"(\w+)(?::[^,]*)?=", text), *inspect.signature(flex_attention).parameters}
    assert names >= {"attn_mask", "is_causal", "block_mask"}
    taken = inspect.signature(dilated_attention).parameters
    assert names - {"return_lse", "kernel_options", "return_aux"} <= {*taken, *ARGUMENTS_OF_TORCH}


def test_heads_and_positions_that_look_swapped():
    """Catches (batch, heads, seq, head_dim), which would attend over heads. One warning, at the caller's line."""
    said = r"12 positions.*257 heads|257 heads.*12 positions"
    with pytest.warns(UserWarning, match=said) as caught:
        dilated_attention(*tensors((1, 12, 257, 4)), DENSE)
    [warning] = caught
    assert warning.filename == __file__
    assert "(batch, seq, heads, head_dim)" in str(warning.message)
    for shape in ((1, 12, 256, 4), (1, 257, 257, 4)):  # a warning would be an error here
        dilated_attention(*tensors(shape), DENSE)


SPLIT = DilatedPattern((8, 8), (1, 1), heads="split")


@pytest.mark.parametrize(
    ("call", "fragments"),
    [
        (
            lambda: ContextParallel(sharding="striped"),
            "sharding='striped' is unknown ... " + " ... ".join(SHARDINGS),
        ),
        (
            lambda: ContextParallel(exchange="broadcast"),
            "exchange='broadcast' is unknown ... auto ... " + " ... ".join(EXCHANGES),
        ),
        (
            lambda: ContextParallel(timeout=3),
            "timeout must be a positive datetime.timedelta ... got 3",
        ),
        (
            lambda: ContextParallel(timeout=timedelta.max),
            "from a millisecond to ten years ... got datetime.timedelta(days=999999999",
        ),
        (lambda: ContextParallel(timeout=timedelta(0)), "must be a positive ... timedelta(0)"),
        (lambda: ContextParallel(align=0), "align must be an integer of at least 1 ... got 0"),
        (lambda: ContextParallel(align=True), "align must be an integer ... got True"),
        (
            lambda: ContextParallel(sharding="zigzag", align=2),
            "zigzag ... align and lengths are for contiguous",
        ),
        (
            lambda: ContextParallel(lengths=(4, 4)),
            "lengths must hold 1 integers ... one for each rank ... got (4, 4)",
        ),
        (lambda: ContextParallel(lengths=(-4,)), "1 integers of at least 0 ... got (-4,)"),
        (lambda: ContextParallel(lengths=(8,), align=2), "align=2 or lengths=(8,), not both"),
        (
            lambda: ContextParallel(group="world"),
            "group must be a ProcessGroup ... DeviceMesh ... got 'world'",
        ),
        # a shard must not drop the end of a sequence
        (
            lambda: ContextParallel(lengths=(8,)).shard(torch.zeros(1, 9)),
            "lengths=(8,) add up to 8 ... 9 positions",
        ),
        (lambda: simulate.all_ranks(0), "number of ranks must be an integer of at least 1, got 0"),
        (lambda: simulate.all_ranks(2.0), "ranks must be an integer of at least 1, got 2.0"),
        # positions must not be made up where the borders do not fit the sequence
        (
            lambda: ContextParallel().positions("8"),
            "seq_len must be an integer of at least 0, got '8'",
        ),
        (lambda: ContextParallel().positions(-1), "an integer of at least 0, got -1"),
        (
            lambda: ContextParallel().positions(8, [0, 8]),
            "cu_seqlens must be a 1-D int32 tensor, got [0, 8]",
        ),
        (
            lambda: ContextParallel().positions(8, integers(0, 7)),
            "end at the length of the sequence, 8; got [0, 7]",
        ),
        (lambda: SPLIT.explain(1), "2 branches ... only 1"),
    ],
)
def test_contexts_and_what_they_give(call, fragments):
    """Catches an argument that is accepted and ignored, and a name without its list."""
    refused(call, fragments)


def test_explain_names_the_choice_and_why_not_the_others():
    """Catches an explanation that does not say why a backend cannot run, or that names what the call would not use."""
    explanation = explain(*tensors(), DENSE)
    assert explanation.kernel == "cpu"
    assert explanation.reasons["cpu"].startswith("chosen")
    assert explanation.reasons["sdpa"] == "serves CUDA tensors, got cpu"
    assert "one rank" in explanation.reasons["exchange"]
    assert "asked for" in explain(*tensors(), DENSE, backend="cpu").reasons["cpu"]
    query, key, value = tensors()
    with torch.autocast("cpu", torch.bfloat16):  # the call takes these tensors too
        in_bfloat16 = explain(query, key.bfloat16(), value.bfloat16(), DENSE)
    assert in_bfloat16.reasons.keys() - explanation.reasons.keys() == {"16-bit rows"}
    for name in BACKENDS:
        assert f"{name}: " in str(explanation)


@pytest.mark.parametrize(
    ("lengths", "rates", "rules", "num_heads", "fragments"),
    [
        (
            (64, 8),
            (12, 1),
            {},
            8,
            "branch 0 (w=64, r=12): all 8 heads ... phases that no head reads: 8, 9, 10, 11"
            " ... branch 1 (w=8, r=1) ... every phase is read",
        ),
        # ceil(5 / 4) = 2 heads of each phase
        ((64,), (4,), {"phase": "blocked"}, 5, "phases that no head reads: 3"),
        (
            (64, 64, 1),
            (4, 4, 4),
            {"heads": "split"},
            3,
            "heads 1..1 read phases 1; phases that no head reads: all but 1"
            " ... heads 2..2 read phases 2; phases that no head reads: 0; r > w",
        ),
    ],
)
def test_explain_of_a_pattern_says_which_phases_nobody_reads(
    lengths, rates, rules, num_heads, fragments
):
    """Catches phases that are lost in silence: fewer heads than phases, or blocked heads that do not divide."""
    text = DilatedPattern(lengths, rates, **rules).explain(num_heads)
    assert [x for x in fragments.split(" ... ") if x not in text] == []

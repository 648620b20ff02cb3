"""docs/migrating.md and docs/fairscale.md: our snippets give the definition, and what other libraries gave.

data/migrating.safetensors holds what they computed. Commit 9f385f8f is the last one with the program that ran them.
"""

from typing import NamedTuple

import pytest
import torch
from distributed import run
from helpers import ROOT, relative_error
from pages import block
from safetensors.torch import load_file

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.reference import dilated_attention_reference

KEPT = load_file(ROOT / "tests" / "data" / "migrating.safetensors")
# torch's normal numbers depend on the CPU's instructions, by a rounding, which a division by a sum amplifies.
DRAWN = torch.randn(64, generator=torch.Generator().manual_seed(0)).double().sum().item()
DRAWS_AS_WHEN_KEPT = DRAWN == 5.932358082383871
BOUNDS = {torch.float64: 1e-7, torch.float32: 1e-6, torch.float16: 2e-3}

IMPORTS = block("docs/migrating.md", "imports")
CHECK = block("docs/migrating.md", "check")
TORCHSCALE = block("docs/migrating.md", "torchscale")
MODULE = block("docs/migrating.md", "torchscale's module")
DIVIDED = block("docs/migrating.md", "dilated-attention-pytorch")
RING = block("docs/migrating.md", "ring")
ZIGZAG = block("docs/migrating.md", "zigzag")
OF_DOCUMENTS = block("docs/migrating.md", "zigzag varlen")
LLAMA3 = block("docs/migrating.md", "llama3")
LUCIDRAINS = block("docs/migrating.md", "ring-attention-pytorch")
GROUPED = block("docs/migrating.md", "ring-attention-pytorch's order of heads")
CONTEXT_PARALLEL = block("docs/migrating.md", "context_parallel")
DEEPSPEED = block("docs/migrating.md", "DeepSpeed")
FAIRSCALE = block("docs/fairscale.md", "FairScale")
CLASSES = block("docs/migrating.md", "RingDilatedAttention")

CAUSAL = ("is_causal=False", "is_causal=True")
UNDIVIDED = (" / len(pattern.branches)", "")
SHARDED = (
    (
        "pattern = ",
        "parallel = ContextParallel()\nquery, key, value = map(parallel.shard, (query, key, value))\npattern = ",
    ),
    ("value, pattern)", "value, pattern, parallel=parallel)"),
)
PADDED = (
    ("pattern = ", "from ring_dilated_attention.models import torchscale_attention\npattern = "),
    ("= dilated_attention(", "= torchscale_attention("),
)


class Case(NamedTuple):
    """A row of the page's last table whose two sides are one function."""

    name: str
    block: str
    replaced: tuple[tuple[str, str], ...] = ()
    num_positions: int = 64
    num_kv_heads: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def snippet(self):
        text = self.block.rpartition("# ours\n")[2]
        for old, new in self.replaced:
            assert old in text
            text = text.replace(old, new)
        return text

    def given(self):
        """What a snippet is given: query, key, value; and x for a module."""
        generator = torch.Generator().manual_seed(0)
        heads = {"query": 4, "key": self.num_kv_heads, "value": self.num_kv_heads}
        shapes = {name: (num, 8) for name, num in heads.items()} | {"x": (32,)}
        return {
            name: torch.randn(1, self.num_positions, *shape, generator=generator).to(self.dtype)
            for name, shape in shapes.items()
        }


CASES = (
    Case("torchscale", TORCHSCALE),
    Case("torchscale, causal", TORCHSCALE, (CAUSAL,)),
    Case("torchscale, 60 positions, causal", TORCHSCALE, (CAUSAL,), 60),
    Case("torchscale, 60 positions, `torchscale_attention`", TORCHSCALE, PADDED, 60),
    Case("torchscale, 2 ranks", TORCHSCALE, SHARDED),
    # in float64: the division by a sum amplifies rounding
    Case("dilated-attention-pytorch", DIVIDED, dtype=torch.float64),
    Case("dilated-attention-pytorch, causal", DIVIDED, (CAUSAL,), dtype=torch.float64),
    Case("ring_flash_attn_func", RING, dtype=torch.float16),
    Case("ring_flash_attn_func, 2 key/value heads", RING, (), 64, 2, torch.float16),
    Case("zigzag_ring_flash_attn_func", ZIGZAG, dtype=torch.float16),
    Case("zigzag_ring_flash_attn_varlen_func", OF_DOCUMENTS, dtype=torch.float16),
    Case("llama3_flash_attn_varlen_func", LLAMA3, dtype=torch.float16),
    Case("ring-attention-pytorch", LUCIDRAINS),
    Case("the same, ours in its order of heads", GROUPED, num_kv_heads=2),
    Case("`context_parallel`", CONTEXT_PARALLEL),
    Case("DeepSpeed Ulysses", DEEPSPEED),
    Case("FairScale's `checkpoint_wrapper`", FAIRSCALE),
    Case("`DilatedAttention`", CLASSES),
    Case(
        "`RingDilatedAttentionProduction`, ours without `/ len(pattern.branches)`",
        CLASSES,
        (UNDIVIDED,),
    ),
)


def by_definition(query, key, value, pattern, *, parallel=None, cu_seqlens=None, scale=None):
    """In place of `dilated_attention`, with shards where it takes shards."""
    rows = (
        x if parallel is None else parallel.unshard(x, cu_seqlens=cu_seqlens)
        for x in (query, key, value)
    )
    documents = None if cu_seqlens is None else cu_seqlens.tolist()
    out, _ = dilated_attention_reference(
        *(x.double() for x in rows), pattern, cu_seqlens=documents, scale=scale
    )
    return out if parallel is None else parallel.shard(out, cu_seqlens=cu_seqlens)


def ours(case, **instead):
    """`out` of our snippet, whole; with other functions in place of some that it imports."""
    names = case.given()
    exec(IMPORTS, names)
    names.update(instead)
    exec(case.snippet, names)
    if "parallel" not in names:
        return names["out"]
    out = names["parallel"].unshard(names["out"], cu_seqlens=names.get("borders"))
    names["parallel"].close()
    return out


def off_the_definition(case):
    return relative_error(ours(case), ours(case, dilated_attention=by_definition))


@pytest.mark.parametrize(
    "case", [case for case in CASES if "mesh" not in case.block], ids=lambda x: x.name
)
def test_ours_is_the_definition_and_what_theirs_computed(case):
    """On one rank."""
    if case.replaced != PADDED:  # its definition is another: tests/models has it
        assert off_the_definition(case) < BOUNDS[case.dtype]
    error = relative_error(KEPT[case.name], ours(case))
    assert error < BOUNDS[case.dtype] or (error < 1e-4 and not DRAWS_AS_WHEN_KEPT)


def test_ours_on_two_ranks():
    run(2, on_a_rank)


def on_a_rank(rank, world_size):
    """Every snippet with ranks; and shards that another library dealt."""
    for case in CASES:
        if "parallel" in case.snippet:
            assert off_the_definition(case) < BOUNDS[case.dtype]
    names = CASES[0].given()
    exec(IMPORTS + ZIGZAG.partition("\n\n")[2].partition("out = ")[0], names)
    parallel = ContextParallel(sharding="zigzag")
    assert torch.equal(parallel.unshard(names["q"]), names["query"])
    parallel.close()


def test_the_module_with_weights_of_torchscale(tmp_path, monkeypatch):
    """Its projections around the definition."""
    monkeypatch.chdir(tmp_path)
    case = Case("module", MODULE)
    given, names = case.given(), case.given()
    projections = torch.nn.ModuleDict({f"{x}_proj": torch.nn.Linear(32, 32) for x in "qkv"})
    projections["out_proj"] = torch.nn.Linear(32, 32)
    torch.save(projections.state_dict(), "torchscale.pt")
    rows = (projections[f"{x}_proj"](given["x"]).unflatten(2, (4, 8)) for x in "qkv")
    exec(IMPORTS + case.snippet, names)
    whole = by_definition(*rows, names["attention"].pattern).float().flatten(2)
    assert relative_error(names["out"], projections["out_proj"](whole)) < 1e-6


def test_the_check_prints_an_error(tmp_path, monkeypatch, capsys):
    """Of the same function, and of another."""
    monkeypatch.chdir(tmp_path)
    for replaced, is_same in (((), True), (((', phase="blocked"', ""),), False)):
        case = Case("torchscale", TORCHSCALE, replaced)
        exec(IMPORTS + CHECK, case.given() | {"out": ours(case)})
        error = float(capsys.readouterr().out.removeprefix("relative error "))
        assert (error < 1e-6) if is_same else (error > 0.1)

"""docs/migrating.md: our snippets give the definition, and what other libraries gave. `make migrating` runs theirs."""

import pytest
import torch
from distributed import run
from helpers import relative_error
from migrating.cases import CASES, CHECK, COLUMNS, IMPORTS, PADDED, ZIGZAG, Case, stated
from migrating.compare import KEPT, agrees
from safetensors.torch import load_file

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.reference import dilated_attention_reference

TABLE = stated()
# torch's normal numbers depend on the CPU's instructions, by a rounding, which a division by a sum amplifies.
DRAWN = torch.randn(64, generator=torch.Generator().manual_seed(0)).double().sum().item()
DRAWS_AS_WHEN_KEPT = DRAWN == 5.932358082383871
ALONE = [case for case in CASES if "mesh" not in case.ours and not case.loads_weights]
ON_RANKS = list({case.ours: case for case in CASES if case.ranks > 1}.values())


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


def ours(case: Case, **instead):
    """`out` of our snippet, whole; with other functions in place of some that it imports."""
    names = case.given()
    exec(IMPORTS, names)
    names.update(instead)
    exec(case.snippets[1].removeprefix(IMPORTS), names)
    parallel = names.get("parallel")
    out = (
        names["out"]
        if parallel is None
        else parallel.unshard(names["out"], cu_seqlens=names.get("borders"))
    )
    if parallel is not None:
        parallel.close()
    return out


def bound(case: Case) -> float:
    return {torch.float64: 1e-7, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[
        case.dtype
    ]


def test_the_page_has_a_row_for_each_case():
    assert list(TABLE) == [case.name for case in CASES]
    for said in TABLE.values():
        assert said["out"]
        assert all(not said[name] for name in COLUMNS[1:]) or all(said[name] for name in COLUMNS)


@pytest.mark.parametrize("case", ALONE, ids=lambda x: x.name)
def test_ours_is_the_definition_and_what_theirs_computed(case):
    """On one rank. Where the page says that the two are one function, against what the library computed."""
    out = ours(case)
    if not set(PADDED) <= set(case.replaced):  # its definition is another: tests/models has it
        assert relative_error(out, ours(case, dilated_attention=by_definition)) < bound(case)
    said = TABLE[case.name]["out"]
    kept = load_file(KEPT)
    assert (case.name in kept) == said.startswith("<")
    if case.name in kept:
        error = relative_error(kept[case.name], out)
        assert agrees(said, error) or (error < 1e-4 and not DRAWS_AS_WHEN_KEPT)


def test_ours_on_two_ranks():
    run(2, on_a_rank)


def on_a_rank(rank, world_size):
    """Every snippet with ranks; and shards that another library dealt."""
    for case in ON_RANKS:
        assert relative_error(ours(case), ours(case, dilated_attention=by_definition)) < bound(case)
    dealt = ZIGZAG["theirs"].partition("out = ")[0].partition("\n\n")[2]
    names = CASES[0].given()
    exec(IMPORTS + dealt, names)
    parallel = ContextParallel(sharding="zigzag")
    assert torch.equal(parallel.unshard(names["q"]), names["query"])
    parallel.close()


def test_the_module_with_weights_of_torchscale(tmp_path, monkeypatch):
    """Its projections around the definition."""
    monkeypatch.chdir(tmp_path)
    [case] = [x for x in CASES if "torchscale.pt" in x.ours]
    projections = torch.nn.ModuleDict(
        {f"{name}_proj": torch.nn.Linear(32, 32) for name in ("q", "k", "v", "out")}
    )
    torch.save(projections.state_dict(), "torchscale.pt")
    query, key, value = (
        projections[f"{name}_proj"](case.given()["x"]).unflatten(2, (4, 8)) for name in "qkv"
    )
    names = case.given()
    exec(case.snippets[1], names)
    whole = by_definition(query, key, value, names["attention"].pattern)
    assert relative_error(names["out"], projections["out_proj"](whole.float().flatten(2))) < 1e-6


def test_ours_between_projections_and_norm_of_dilated_attention_pytorch(tmp_path, monkeypatch):
    """With weights that have the names and shapes of its module."""
    monkeypatch.chdir(tmp_path)
    [case] = [x for x in CASES if '"weights.pt"' in x.ours]
    layers = {f"{name}_proj": torch.nn.Linear(32, 32) for name in ("q", "k", "v", "out")}
    layers["norm"] = torch.nn.LayerNorm(32)
    torch.save(torch.nn.ModuleDict(layers).double().state_dict(), "weights.pt")
    assert relative_error(ours(case), ours(case, dilated_attention=by_definition)) < bound(case)


def test_the_check_prints_an_error(tmp_path, monkeypatch, capsys):
    """Of the same function, and of another."""
    monkeypatch.chdir(tmp_path)
    for name, is_same in (("torchscale", True), ("torchscale beside ours by default", False)):
        [case] = [x for x in CASES if x.name == name]
        names = case.given() | {"out": ours(case)}
        exec(IMPORTS + CHECK["theirs"] + CHECK["ours"], names)
        error = float(capsys.readouterr().out.removeprefix("relative error "))
        assert (error < 1e-6) if is_same else (error > 0.1)

"""docs/how_it_works.md is what the code does."""

import how_it_works
import torch
from how_it_works import NUM_RANKS, PAGE, SHARDED_CALL, page

from ring_dilated_attention import dilated_attention
from ring_dilated_attention.kernels import cpu
from ring_dilated_attention.plan import program as programs
from ring_dilated_attention.plan.exchange import plan_exchange
from ring_dilated_attention.plan.program import MOST_KEPT_TILES, make_program, program_of
from ring_dilated_attention.plan.step import CallFacts


def test_the_page_is_made_from_the_code():
    """Catches a page that shows another program, another message or other numbers than the code."""
    assert PAGE.read_text() == page(), "python tests/how_it_works.py writes it anew"


def test_the_merged_numbers_are_the_definition():
    """Catches merges that end elsewhere than the definition in the table of the page."""
    *_, last, defined = (line.split("|")[-3:-1] for line in how_it_works.merging().splitlines())
    assert last == defined


def test_programs_are_kept_for_calls_of_the_same_shape_if_they_are_short():
    """Catches a program that is made for every call, and one of many tiles that is kept."""
    plan = plan_exchange("ring", SHARDED_CALL, NUM_RANKS - 1).plan
    assert program_of(plan, "forward", CallFacts()) is program_of(plan, "forward", CallFacts())
    assert program_of(plan, "forward", CallFacts(batch=2)) is not program_of(
        plan, "forward", CallFacts()
    )
    many = CallFacts(batch=MOST_KEPT_TILES)
    kept = programs._kept.cache_info().currsize
    assert program_of(plan, "forward", many) == make_program(plan, "forward", many)
    assert programs._kept.cache_info().currsize == kept


def test_a_call_chooses_its_kernel_and_reads_its_borders_once(monkeypatch):
    """Catches a backward that chooses again, and one that waits for the device to read the borders again."""
    asked, borders = [], torch.tensor([0, 5, 12], dtype=torch.int32)
    read, why_not = torch.Tensor.tolist, cpu.why_not
    monkeypatch.setattr(cpu, "why_not", lambda query: asked.append("kernel") or why_not(query))
    monkeypatch.setattr(
        torch.Tensor,
        "tolist",
        lambda x: (asked.append("borders") if x.dtype == torch.int32 else None) or read(x),
    )
    query = torch.randn(1, 12, 2, 4, requires_grad=True)
    dilated_attention(
        query, query, query, how_it_works.PATTERN, cu_seqlens=borders
    ).sum().backward()
    assert sorted(asked) == ["borders", "kernel"]

"""The comparison of exchanges, and the advice on a step that waits."""

import pytest

from ring_dilated_attention.forecast.call_cost import Exchange, PlannedCall, forecast
from ring_dilated_attention.forecast.clock import Hardware
from ring_dilated_attention.forecast.exchanges import OTHERWISE, advice, alternatives, best_of
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.step import Sizes

DENSE = PlannedCall(DilatedPattern.dense(is_causal=True), 4096, 4, 8, 8, Sizes(1, 16, 4))


def advised(call, hardware, exchange=Exchange(), sharding="contiguous", best=None):  # noqa: B008
    job = call.job(sharding)
    figures = forecast(job, exchange, call.sizes, hardware=hardware)
    return advice(job, exchange, call.sizes, figures, hardware, best)


def test_all_ways_are_compared_by_time():
    rows = alternatives(DENSE, Hardware(1e10, 1e9))
    assert {(str(row.exchange), row.sharding) for row in rows} == {
        (exchange, sharding)
        for exchange in ("ring", "all_gather", "all_to_all", "2-D, 2 deal heads")
        for sharding in ("contiguous", "zigzag")
    }
    seconds = [row.figures.seconds for row in rows]
    assert seconds == sorted(seconds)
    for row in rows:
        job = DENSE.job(row.sharding, row.exchange.inner)
        assert row.figures == forecast(job, row.exchange, DENSE.sizes, hardware=Hardware(1e10, 1e9))
    assert best_of(rows).figures.seconds <= 1.02 * seconds[0]


def test_ways_that_are_impossible_say_why():
    rows = alternatives(DENSE._replace(num_kv_heads=2), Hardware(1e10, 1e9))
    refused = [row for row in rows if row.figures is None]
    assert {str(row.exchange) for row in refused} == {"all_to_all"}
    assert "2 key/value heads do not divide among 4 ranks" in refused[0].why_not
    assert rows[-1].figures is None


def test_without_hardware_ways_are_compared_by_balance():
    rows = alternatives(DENSE, None)
    assert best_of(rows) is None
    balances = [row.figures.balance for row in rows]
    assert balances == sorted(balances, reverse=True)


def test_a_better_exchange_is_named_before_a_change_of_the_pattern():
    """Dense attention over a slow network: zigzag balances it, and its branch could be sparser."""
    hardware = Hardware(1e10, 2e7)
    pattern = DilatedPattern((512, 4096), (1, 2), is_causal=True)
    call = DENSE._replace(pattern=pattern)
    rows = alternatives(call, hardware)
    said = advised(call, hardware, best=best_of(rows))
    assert said[0].startswith("Exchange ")
    assert "would be faster" in said[0]
    assert "at rate 8 instead of 2 a step would take" in said[1]


def test_a_step_that_waits_for_nothing_gets_no_advice():
    hardware = Hardware(1e8, 1e12)
    rows = alternatives(DENSE, hardware)
    best = best_of(rows)
    assert advised(DENSE, hardware, best.exchange, best.sharding, best) == []


def test_dealt_heads_and_branches_that_can_be_no_sparser_get_other_advice():
    hardware = Hardware(1e12, 1e7)
    [said] = advised(DENSE, hardware, Exchange("all_to_all"))
    assert "Dealing heads sends every position" in said
    [said] = advised(DENSE._replace(pattern=DilatedPattern((4096,), (2048,))), hardware)
    assert said.endswith(f"{OTHERWISE}.")


@pytest.mark.parametrize("hosts", [{}, {"gpus_per_host": 2, "host_bytes_per_second": 1e10}])
def test_heads_are_dealt_within_a_host(hosts):
    rows = alternatives(DENSE._replace(num_ranks=8), Hardware(1e10, 1e9, **hosts))
    dealt = {row.exchange.inner for row in rows if row.exchange.inner > 1}
    assert dealt == ({2} if hosts else {4})

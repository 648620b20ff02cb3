"""The comparison of exchanges."""

import pytest

from ring_dilated_attention.forecast.call_cost import Exchange, PlannedCall, forecast
from ring_dilated_attention.forecast.clock import Hardware
from ring_dilated_attention.forecast.exchanges import alternatives, better
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.step import Sizes

DENSE = PlannedCall(DilatedPattern.dense(is_causal=True), 4096, 4, 8, 8, Sizes(1, 16, 4))


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


def test_ways_that_are_impossible_are_left_out():
    rows = alternatives(DENSE._replace(num_kv_heads=2), Hardware(1e10, 1e9))
    assert {str(row.exchange) for row in rows} == {"ring", "all_gather", "2-D, 2 deal heads"}
    rows = alternatives(DENSE._replace(num_heads=9, num_kv_heads=3), Hardware(1e10, 1e9))
    assert {str(row.exchange) for row in rows} == {"ring", "all_gather"}


def test_without_hardware_ways_are_compared_by_balance():
    rows = alternatives(DENSE, None)
    balances = [row.figures.balance for row in rows]
    assert balances == sorted(balances, reverse=True)


def test_a_better_exchange_is_named():
    """Of dense causal attention: one that balances it."""
    hardware = Hardware(1e10, 1e12)
    rows = alternatives(DENSE, hardware)
    figures = forecast(DENSE.job(), Exchange(), DENSE.sizes, hardware=hardware)
    best = rows[0]
    said = f"Exchange {best.exchange} with {best.sharding} shards would be faster: "
    assert better(figures, rows).startswith(said)
    assert best.figures.seconds < 0.6 * figures.seconds
    assert better(best.figures, rows) == ""
    assert better(figures, []) == ""


@pytest.mark.parametrize("hosts", [{}, {"gpus_per_host": 2, "host_bytes_per_second": 1e10}])
def test_heads_are_dealt_within_a_host(hosts):
    rows = alternatives(DENSE._replace(num_ranks=8), Hardware(1e10, 1e9, **hosts))
    dealt = {row.exchange.inner for row in rows if row.exchange.inner > 1}
    assert dealt == ({2} if hosts else {4})

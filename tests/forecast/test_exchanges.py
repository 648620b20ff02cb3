"""The comparison of exchanges."""

import pytest

from ring_dilated_attention.forecast.call_cost import Exchange, PlannedCall, forecast
from ring_dilated_attention.forecast.clock import Hardware
from ring_dilated_attention.forecast.exchanges import alternatives, better
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.sharding import WITHOUT_DOCUMENTS
from ring_dilated_attention.plan.step import Sizes

DENSE = PlannedCall(DilatedPattern.dense(is_causal=True), 4096, 4, 8, 8, Sizes(1, 16, 4))
HARDWARE = Hardware(1e10, 1e9)
HOSTS_OF_TWO = HARDWARE._replace(gpus_per_host=2, host_bytes_per_second=1e10)


@pytest.mark.parametrize(
    ("changes", "hardware", "more"),
    [
        ({}, HARDWARE, {"all_to_all", "2-D, 2 deal heads"}),
        ({"num_ranks": 8}, HARDWARE, {"all_to_all", "2-D, 4 deal heads"}),
        ({"num_ranks": 8}, HOSTS_OF_TWO, {"all_to_all", "2-D, 2 deal heads"}),
        ({"num_kv_heads": 2}, HARDWARE, {"2-D, 2 deal heads"}),
        ({"num_heads": 9, "num_kv_heads": 3}, None, set()),
    ],
)
def test_all_ways_are_compared_by_time(changes, hardware, more):
    """Those that are possible. Heads are dealt within a host. Without hardware balance decides."""
    call = DENSE._replace(**changes)
    rows = alternatives(call, hardware)
    assert {(str(row.exchange), row.sharding) for row in rows} == {
        (exchange, sharding)
        for exchange in ("ring", "all_gather", *more)
        for sharding in WITHOUT_DOCUMENTS
    }
    order = [row.figures.seconds if hardware else -row.figures.balance for row in rows]
    assert order == sorted(order)
    for row in rows:
        sharded_call = call.sharded_call(row.sharding, row.exchange.inner)
        assert row.figures == forecast(sharded_call, row.exchange, call.sizes, hardware=hardware)


def test_a_better_exchange_is_named():
    """Of dense causal attention: one that balances it."""
    hardware = Hardware(1e10, 1e12)
    rows = alternatives(DENSE, hardware)
    figures = forecast(DENSE.sharded_call(), Exchange(), DENSE.sizes, hardware=hardware)
    best = rows[0]
    said = f"Exchange {best.exchange} with {best.sharding} shards would be faster: "
    assert better(figures, rows).startswith(said)
    assert best.figures.seconds < 0.6 * figures.seconds
    assert better(best.figures, rows) == ""
    assert better(figures, []) == ""

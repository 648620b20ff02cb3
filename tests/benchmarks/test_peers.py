"""Peers beside this library: that a wrong one is seen, that none is dropped, that bytes are those that are sent."""

import pytest
import torch
import torch.distributed as dist

from benchmarks import peers
from benchmarks.measure import allocated
from benchmarks.peers import adapters, environments, examine, report
from benchmarks.peers.catalogue import DENSE, PEERS, Peer
from ring_dilated_attention.commands.local_ranks import Launch, run_ranks

SETTINGS = peers.QUICK.of_each


def off(call):
    """Right but for one part in a thousand of the keys' gradient."""
    attend = adapters.dense(call)
    return lambda q, k, v: attend(q, k + 1e-3 * (k - k.detach()), v)


def strict(call):
    raise ValueError("Mondays only")


def short(call):
    return lambda q, k, v: q[:, ::2]


@pytest.mark.parametrize(
    ("adapter", "verdict", "reason"),
    [
        (adapters.dense, "right", None),
        (off, "wrong", None),
        (strict, "refused", "ValueError: Mondays only"),
        (short, "wrong", "out is (1, 128, 2, 16) for a query of (1, 256, 2, 16)"),
    ],
)
def test_a_peer_is_judged_by_what_it_returns(adapter, verdict, reason):
    found = examine.check(Peer("a peer", "1", adapter, DENSE), SETTINGS, "full")
    assert (found["verdict"], found.get("reason")) == (verdict, reason)
    if adapter is off:
        assert found["errors"]["dk"] == pytest.approx(1e-3, rel=1e-2)
        assert found["errors"]["dq"] < 1e-6


def test_what_an_interface_lacks_is_not_run():
    peer = Peer("a peer", "1", strict, DENSE, lacks=("packed",), not_run=("uneven",))
    assert [
        examine.check(peer, SETTINGS, name)["verdict"] for name in peer.lacks + peer.not_run
    ] == [
        "not offered",
        "not run",
    ]


def test_a_peer_that_cannot_be_installed_leaves_a_row(monkeypatch, tmp_path):
    """With the reason, beside a gate of this library; so does a checkout that is not named."""

    def no_index(*command):
        raise environments.NotThereError("pip: No matching distribution found")

    monkeypatch.setattr(environments, "_run", no_index)
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.delenv("TORCHSCALE_CHECKOUT", raising=False)
    chosen = tuple(peer for peer in PEERS if peer.name in ("torchscale", "ring-attention-pytorch"))
    rows = peers.run(peers.Settings(chosen, SETTINGS), lambda text: None)
    assert [row["reason"] for row in rows] == [
        "TORCHSCALE_CHECKOUT is not set: it names a clone of its repository",
        "pip: No matching distribution found",
    ]
    assert all(row["gate"]["passed"] for row in rows)
    text = report.table(rows)
    assert "ring-attention-pytorch, everything: pip: No matching distribution found" in text


def test_this_library_must_be_right(monkeypatch):
    found = {"inputs": {"full": {"verdict": "wrong", "errors": {"dk": 1.0}}}}
    monkeypatch.setattr(examine, "examine", lambda peer, settings: found)
    with pytest.raises(peers.GateError, match="this library, full"):
        peers.found_of(PEERS[0], SETTINGS)


def _sent(worker):
    x = torch.zeros(8, 2)
    calls = {
        "equal shares": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        "all to the other": lambda: dist.all_to_all_single(
            torch.empty_like(x), x, *([[0, 8], [8, 0]][worker.rank] for _ in range(2))
        ),
        "all_gather": lambda: dist.all_gather([torch.empty_like(x) for _ in range(2)], x),
        "control": lambda: dist.all_gather(
            [torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.zeros(1).long()
        ),
    }
    return {name: allocated(call).sent_bytes for name, call in calls.items()}


def test_bytes_of_collectives():
    """Of 64 bytes on each of two ranks."""
    expected = {"equal shares": 32, "all to the other": 64, "all_gather": 64, "control": 0}
    assert run_ranks(Launch(2), _sent) == [expected] * 2

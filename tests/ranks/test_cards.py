"""One process, several GPUs: a rank works on its own alone. No GPU here: torch.cuda's answers are stand-ins."""

from contextlib import nullcontext
from functools import partial
from threading import get_ident
from types import SimpleNamespace

import pytest
import torch

from ring_dilated_attention.ranks.cards import number_of_card
from ring_dilated_attention.ranks.link import GroupLink
from ring_dilated_attention.simulate.all_ranks import run_in_turn

SECOND, THIRD = (torch.device("cuda", k) for k in (1, 2))


@pytest.mark.parametrize(
    ("bound", "current", "environment", "count", "number"),
    [
        # init_process_group("nccl", device_id=...), and no set_device
        (THIRD, 0, {"LOCAL_RANK": "1"}, 4, 2),
        (THIRD, 1, {}, 4, 2),
        (None, 0, {"LOCAL_RANK": "1"}, 4, 1),  # neither
        (None, 0, {"LOCAL_RANK": "3"}, 1, 0),  # each process sees one GPU, its own
        (None, 0, {"SLURM_LOCALID": "3"}, 4, 3),
        (None, 3, {"LOCAL_RANK": "1"}, 4, 3),  # set_device
        (None, 0, {}, 4, 0),
        (None, 0, {"LOCAL_RANK": ""}, 4, 0),
        (None, 0, {"LOCAL_RANK": "1"}, 0, 0),
        (torch.device("cuda"), 0, {"LOCAL_RANK": "1"}, 4, 1),
    ],
)
def test_the_card_of_a_process(bound, current, environment, count, number):
    """Catches GPU 0 on every rank."""
    assert number_of_card(bound, current, environment, count) == number


@pytest.mark.parametrize(
    ("backends", "bound", "cards"),
    [
        ({"cpu": "gloo", "cuda": "gloo"}, None, []),
        ({"cpu": "gloo", "cuda": "nccl"}, THIRD, [THIRD]),
        ({"cuda": "nccl"}, None, [SECOND]),
    ],
)
def test_the_first_call_on_nccl_is_of_all_ranks(monkeypatch, backends, bound, cards):
    """Catches a communicator whose first batch is of some ranks only, which torch does not define, and one of GPU 0."""
    sent = []
    monkeypatch.setattr(torch, "zeros", lambda number, device: (number, device))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: sent.append((*x, group)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    link = GroupLink.__new__(GroupLink)
    link.backends, link.group = backends, SimpleNamespace(bound_device_id=bound)
    link.open()
    assert sent == [(1, torch.device(card), link.group) for card in cards]


def test_the_threads_of_simulated_ranks_have_the_card_and_the_stream_of_their_caller(monkeypatch):
    """Catches threads on the default stream, whose kernels may run before those that make their inputs. And threads
    that go back to GPU 0 when they have computed: each process then has half a GB there. A stand-in plays CUDA."""
    deeds = []

    def noted(*what):
        deeds.append((get_ident(), *what))
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    current = SimpleNamespace(device=THIRD)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: current if get_ident() == caller else None
    )
    monkeypatch.setattr(torch.cuda, "set_device", partial(noted, "set_device"))
    monkeypatch.setattr(torch.cuda, "stream", partial(noted, "stream"))
    caller = get_ident()
    run_in_turn(3, lambda rank, link: noted("computes"))
    for i in range(0, 9, 3):
        thread = deeds[i][0]
        assert thread != caller
        assert deeds[i : i + 3] == [
            (thread, "set_device", THIRD),
            (thread, "stream", current),
            (thread, "computes"),
        ]
    assert len(deeds) == 9

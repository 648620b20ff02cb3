"""One process, several GPUs: a rank works on its own alone. No GPU here: torch.cuda's answers are stand-ins."""

from contextlib import nullcontext
from threading import current_thread, main_thread
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
        (None, 0, {"LOCAL_RANK": "5"}, 4, 1),
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


@pytest.fixture
def deeds(monkeypatch):
    """What threads do with torch.cuda, each time with the thread's name."""
    done: list[tuple] = []

    def noted(*what):
        done.append((current_thread() is main_thread(), *what))
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(device=THIRD))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: noted("set_device", device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: noted("stream", stream.device))
    return done


def test_the_thread_of_a_simulated_rank_has_the_card_of_its_caller(deeds, monkeypatch):
    """Catches a thread that goes back to GPU 0 when it has computed: each process then has half a GB there."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    run_in_turn(1, lambda rank, link: deeds.append(("computes",)))
    assert deeds == [(False, "set_device", THIRD), (False, "stream", THIRD), ("computes",)]

"""The doctor's rates: in which dtype, and whether others used the machine meanwhile."""

import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch

from ring_dilated_attention.commands.doctor import doctor, examination
from ring_dilated_attention.commands.hardware import machine_of

REMEDY = "rates may be too low; measure again when the machine is quiet"


def processors(own, busy, host="h0", whole=20.0):
    return {"host": host, "processors": {"all": whole, "busy": busy, "own": own}}


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        ([processors(9.5, 10)], ""),
        ([processors(4, 10)], "30%"),
        ([processors(4, 10), processors(5, 10.5)], ""),  # what ranks of the host take is not others'
        ([processors(4, 10), processors(4, 10), processors(10, 11, "h1")], ""),
        ([processors(9, 10), processors(2, 18, "h1")], "80%"),
        ([processors(0, 0, whole=0)], ""),  # the system does not say
    ],
)
def test_a_busy_machine_is_said(ranks, share, tmp_path, capsys):
    """And goes into the file, so that every plan that reads it says so. Catches a rank's own work taken for others'."""
    rates = {"flops_per_second": 1e12, "backward_flops_per_second": 5e11, "call_seconds": 1e-5, "around_seconds": 0.0}
    more = {"rates": rates, "memory_bytes": 1e9, "threads": 1, "hardware": {"processor": "CPU"}}
    more |= {"versions": {"torch": "2.13.0"}, "harmful": {}, "matter": {}, "interfaces": [], "backends": {"cpu": None}}
    more |= {"folder": {"path": "/x", "free_bytes": 10**12}, "clock": 0.0, "gpu": None, "dtype": "float32"}
    more |= {"agreement": {"passed": True, "quantity": "dq", "error": 1.0, "tolerance": 1e-6}}
    everyone = [{"rank": rank, **more, **x} for rank, x in enumerate(ranks)]
    said = f"other processes took {share} of the processors" if share else ""
    assert doctor.taken_by_others(everyone) == said
    file = tmp_path / "here.toml"
    assert doctor.report(Namespace(json=True, save=file), everyone) == 0
    error = capsys.readouterr().err
    assert error == (f"rda doctor: {said} while it measured: {REMEDY}\n" if share else "")
    assert machine_of(str(file)).source.endswith(f"CPU, while {said}" if share else "CPU")
    for one in everyone:
        one["bfloat16_speedup"] = 1.0
    assert doctor.report(Namespace(json=False, save=None), everyone) == 0
    out, error = capsys.readouterr()
    assert error == ""
    end = " ".join(out.partition("\nready")[2].split())
    assert end == (f", but {said} while it measured: {REMEDY}" if share else "")
    everyone[0]["agreement"]["passed"] = False
    assert doctor.report(Namespace(json=False, save=None), everyone) == 1
    _, _, end = " ".join(capsys.readouterr().out.split()).partition(" 1. ")
    assert " 2. " not in end  # it is nothing to mend
    assert end.endswith(f" {said} while it measured: {REMEDY}") == bool(share)


def test_the_processors_are_those_of_this_machine():
    """Catches a column of /proc/stat that counts something else, and seconds in other units."""
    if not Path("/proc/stat").exists():
        pytest.skip("the system does not say what its processors do")
    before, began = examination.processors(), time.process_time()
    while time.process_time() < began + 0.2:
        pass
    after = examination.processors()
    spent = {name: after[name] - before[name] for name in before}
    assert spent["own"] == pytest.approx(0.2, abs=0.05)
    assert spent["own"] - 0.05 <= spent["busy"] <= spent["all"] + 0.05  # in ticks of 10 ms for each processor


@pytest.mark.parametrize(
    ("speedups", "dtype"), [((3.0, 1.5), "bfloat16"), ((3.0, 1.0), "float32"), ((0.5,), "float32")]
)
def test_rates_are_measured_in_the_dtype_that_is_advised(speedups, dtype, monkeypatch):
    """The slowest rank's word counts for all. Catches a file with rates of another dtype than the advice."""
    measured = []
    monkeypatch.setattr(examination, "speedup", lambda parallel, device: speedups[0])
    monkeypatch.setattr(examination, "values_of_all", lambda parallel, value: list(speedups))
    monkeypatch.setattr(examination, "rates", lambda parallel, device, dtype: measured.append(dtype) or {"x": 1.0})
    monkeypatch.setattr(examination, "SECONDS_APART", 0)
    alone = mock.Mock(world_size=1)
    found = examination.speeds(alone, "cpu", None, "")
    assert set(measured) == {getattr(torch, dtype)}
    assert (found["dtype"], found["bfloat16_speedup"]) == (dtype, speedups[0])
    assert examination.dtype_advice(None, min(speedups)).startswith(f"{dtype}: ")
    assert examination.speeds(alone, "cpu", None, "float32")["dtype"] == "float32"
    assert examination.speeds(alone, "cuda:0", {"capability": [7, 0]}, "")["dtype"] == "float16"

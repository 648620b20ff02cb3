"""What a run writes as it goes."""

import json

import pytest

from ring_dilated_attention.training.metrics import METRICS_FILE, Metrics, Step

RUN = "0123456789abcdef"


def step(number):
    held_out = 2.5 if number == 2 else None
    return Step(RUN, number, 2.0, held_out, 0.5, 200.0, [10_000_000, 20_000_000])


def written(folder):
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_a_resumed_run_goes_on_where_it_was_saved(tmp_path):
    """Each step is there at once. Catches steps that are there twice, a line that the end of a run cut off, and a step
    that is no number."""
    with Metrics(tmp_path, RUN, 0, 0) as metrics:
        for number in range(1, 6):
            metrics.add(step(number))
            assert written(tmp_path)[-1] == step(number)._asdict()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": "2"}\n{"step": 6, "lo')
    with Metrics(tmp_path, RUN, 3, 0) as metrics:
        metrics.add(step(4))
    assert [row.get("step") for row in written(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_run_that_fails_before_its_first_checkpoint_leaves_no_metrics(has_checkpoint, tmp_path):
    """It cannot go on, and another run may have its folder."""

    def fail():
        with Metrics(tmp_path, RUN, 0, 0) as metrics:
            metrics.add(step(1))
            if has_checkpoint:
                (tmp_path / "checkpoint-000001").mkdir()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / METRICS_FILE).exists() == has_checkpoint

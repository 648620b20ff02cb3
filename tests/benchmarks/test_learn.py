"""What dilated patterns learn: influence is reach, questions leak nothing, and a study goes on where it ended."""

import json

import numpy
import pytest
import torch
from drawn import patterns
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import command
from benchmarks.learn import influence, recall, text
from benchmarks.learn.influence import Case
from benchmarks.learn.recall import Asker, draw

N, HEADS = 16, 3


@given(patterns(HEADS, longest=N), st.integers(1, 3), st.integers(0, N - 1))
@settings(max_examples=10, deadline=None)
def test_a_changed_token_moves_what_reach_names(pattern, layers, border):
    """Every hidden state of a float64 model, to the bit, and no other; also in packed documents."""
    rules = {"is_causal": pattern.is_causal, "phase": pattern.phase, "heads": pattern.heads}
    borders = (0, border, N) if border % 5 == 1 else (0, N)
    sizes = {"num_layers": layers, "num_heads": HEADS}
    found = influence.compare(Case(pattern.segment_lengths, pattern.dilation_rates, borders, **rules, **sizes))
    assert (found["moved_but_not_named"], found["named_but_not_moved"]) == (0, 0)
    assert found["pairs"] == layers * N**2


def test_another_reach_is_noticed():
    """Proof that the comparison sees a wrong name, and a state that does not move."""
    case = Case((4, N), (1, 4), (0, N), num_layers=2)
    model = influence.model_of(case, 0)
    moves = influence.moved(model, case.borders, 0)
    for lengths, rates in (((4, N), (1, 5)), ((5, N), (1, 4)), ((4,), (1,))):
        other = influence.model_of(case._replace(lengths=lengths, rates=rates), 0).config.pattern
        assert not torch.equal(moves, influence.named(other, case.borders, case.num_heads, case.num_layers))


def test_a_question_is_answered_by_its_fact_alone():
    """Catches an answer that stands elsewhere, a fact that is told twice, and values that are not equally likely."""
    task = recall.FULL[0]
    batch = draw(task, 64, 500, numpy.random.default_rng(0))
    num_facts = task.num_keys * task.num_values
    assert batch.tokens_BN.shape == (500, 64)
    assert ((batch.tokens_BN < num_facts).sum(1) == task.num_keys).all()
    questions = (batch.tokens_BN >= num_facts) & (batch.tokens_BN < num_facts + task.num_keys)
    assert (questions.sum(1) == task.num_keys).all()
    fact, question = (batch.tokens_BN[batch.row_Q, place] for place in (batch.fact_Q, batch.question_Q))
    assert torch.equal(fact, (question - num_facts) * task.num_values + batch.answer_Q)
    assert (batch.fact_Q < batch.question_Q).all()
    assert torch.bincount(batch.answer_Q).tolist() == pytest.approx([500] * task.num_values, abs=80)
    distances = torch.bincount((batch.question_Q - batch.fact_Q).double().log2().long())
    assert distances.tolist() == pytest.approx([2000 / 6] * 6, rel=0.25)  # as many between 1 and 2 as between 32 and 64


def test_what_is_answered_is_counted_by_distance_and_reach():
    task = recall.QUICK[0]
    asker = Asker(task, 32, recall.pattern_of("local", 32, task.local), 0)
    batch = asker.draw()

    def oracle(tokens_BN):
        """Knows the answers of questions in the second half of a sequence."""
        logits = torch.zeros(*tokens_BN.shape, 8)
        late = batch.question_Q >= 16
        logits[batch.row_Q[late], batch.question_Q[late], batch.answer_Q[late]] = 1
        logits[batch.row_Q[~late], batch.question_Q[~late], 1 - batch.answer_Q[~late]] = 1
        return logits

    asker.loss(batch, oracle)
    late, near = batch.question_Q >= 16, batch.question_Q // 16 == batch.fact_Q // 16
    for reached in (0, 1):
        assert asker.counts[0, reached].sum() == (near == bool(reached)).sum()
        assert asker.counts[1, reached].sum() == (late & (near == bool(reached))).sum()
    assert asker.accuracy() == late.double().mean().item()


def test_a_curve_overtakes_another():
    shorter = [[0, 0, 0, 5.0], [10, 5, 0, 4.0], [20, 10, 0, 3.5]]
    longer = [[0, 0, 0, 5.0], [10, 10, 0, 4.2], [20, 20, 0, 3.0]]
    assert text.bits_at(shorter, 0, 15) == 3.75
    assert text.bits_at(shorter, 0, 21) is None
    assert text.overtakes(longer, shorter, 0) == 20
    assert text.overtakes(longer, shorter, 1) is None
    assert text.overtakes(shorter, longer, 1) == 5


def test_a_study_goes_on_where_it_ended(tmp_path, monkeypatch, capsys):
    """Each run is kept when it is done. A second start makes the missing ones alone; a page and pictures follow."""
    learn = ["learn", "--quick", "--results", str(tmp_path / "results")]
    whole, made = recall.run_one, []

    def stops_at_the_second(*arguments):
        made.append(arguments)
        if len(made) == 2:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(recall, "run_one", stops_at_the_second)
    assert command.main([*learn, "recall"]) == 130
    kept = tmp_path / "results" / "learn_recall.json"
    [first] = json.loads(kept.read_text())["rows"]
    assert command.main(learn) == 0
    record = json.loads(kept.read_text())
    assert record["command"] == "python -m benchmarks learn recall --quick"
    assert record["rows"][0] == first
    assert [row["name"] for row in record["rows"]] == ["32 local seed 0", "32 dense seed 0"]
    assert len(made) == 3
    assert command.main([*learn, "--list"]) == 0
    said = capsys.readouterr().out
    assert said.count(": done") == 8
    assert "to come" not in said
    page = (tmp_path / "README.md").read_text()
    assert all(f"## learn_{study}\n" in page for study in ("influence", "recall", "text", "borders"))
    assert command.main([*learn, "--pictures", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "learning_borders.png",
        "learning_recall.png",
        "learning_text.png",
    ]


def test_an_unknown_study_is_refused(capsys):
    assert command.main(["learn", "speed"]) == 2
    assert "unknown study 'speed'; choose from influence" in capsys.readouterr().err

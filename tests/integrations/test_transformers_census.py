"""Every architecture of the pinned transformers is equal to its own attention under log M, refused, or not built; and
over two ranks it is right, or refused; and as it was trained it is equal over ranks, refused, or not built."""

import json
from collections import Counter

import pytest
from census import LIST, architectures, outcome
from census_as_trained import LIST_AS_TRAINED, architectures_as_trained, over_ranks
from census_as_trained import SHARES as SHARES_AS_TRAINED
from census_ranks import LIST_OVER_RANKS, architectures_over_ranks, over_two_ranks
from census_ranks import SHARES as SHARES_OVER_RANKS

SHARES = 24
COMMITTED = json.loads(LIST.read_text())
AS_TRAINED = json.loads(LIST_AS_TRAINED.read_text())
OVER_RANKS = json.loads(LIST_OVER_RANKS.read_text())


def test_all_are_named():
    """None in between: not one computes another function, and no two ways of making it disagree."""
    assert [*COMMITTED] == [*architectures()]
    counts = Counter(found for found, _ in COMMITTED.values())
    assert set(counts) == {"equal", "refused", "not built"}
    assert counts["not built"] < len(COMMITTED) / 5


@pytest.mark.parametrize("share", range(SHARES))
def test_as_committed(share):
    names = list(architectures().items())[share::SHARES]
    assert {name: outcome(*kinds) for name, kinds in names} == {
        name: COMMITTED[name] for name, _ in names
    }


def test_all_are_named_over_ranks():
    assert [*OVER_RANKS] == [*architectures_over_ranks()]
    assert {outcome for outcome, _ in OVER_RANKS.values()} == {"right", "refused"}
    assert OVER_RANKS["llama: LlamaModel"] == ["right", "dynamic, longrope"]


@pytest.mark.parametrize("share", range(SHARES_OVER_RANKS))
def test_over_ranks_as_committed(share):
    names = [*architectures_over_ranks()][share::SHARES_OVER_RANKS]
    assert over_two_ranks(names) == {name: OVER_RANKS[name] for name in names}


def test_all_are_named_as_trained():
    assert [*AS_TRAINED] == [*architectures_as_trained()]
    assert {outcome for outcome, _ in AS_TRAINED.values()} == {"equal", "refused", "not built"}
    for name in ("gemma3_text: Gemma3ForCausalLM", "modernbert: ModernBertForMaskedLM"):
        assert AS_TRAINED[name] == ["equal", "dense, windows"]
    assert AS_TRAINED["gpt_oss: GptOssForCausalLM"] == ["equal", "dense, sinks, windows"]


@pytest.mark.parametrize("share", range(SHARES_AS_TRAINED))
def test_as_trained_as_committed(share):
    names = [*architectures_as_trained()][share::SHARES_AS_TRAINED]
    assert over_ranks(names) == {name: AS_TRAINED[name] for name in names}

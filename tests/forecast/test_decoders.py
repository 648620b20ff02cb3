"""Models of a config.json: parameters as published, sizes that memory follows, and what is refused."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT

from ring_dilated_attention.commands import cli
from ring_dilated_attention.forecast.decoders import FAMILIES, read_decoder
from ring_dilated_attention.forecast.training_cost import Mesh, ModelJob, model_memory
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern

DATA = ROOT / "tests" / "data"
PUBLISHED = json.loads((DATA / "published_parameters.json").read_text())
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def config_of(name):
    return json.loads((DATA / "configs" / f"{name}.json").read_text())


def plan(tmp_path, config, *more):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return cli.main(["plan", "model", "--config", str(tmp_path), "--seq-len", "512", *more])


BRANCHES = ["--segment-lengths", "64", "--dilation-rates", "1"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_were_published(name):
    family, shape = read_decoder(config_of(name))
    assert shape.num_parameters == PUBLISHED[name]
    assert family == config_of(name)["model_type"]


def test_the_record_has_every_model_counted_published_and_built():
    rows = json.loads((ROOT / "benchmarks" / "results" / "parameters.json").read_text())["rows"]
    assert {row["model"]: row["counted"] for row in rows} == PUBLISHED
    assert all(row["counted"] == row["published"] == row["built"] for row in rows)
    assert len({row["family"] for row in rows}) >= 10


def test_there_is_a_config_for_each_number():
    assert {path.stem for path in (DATA / "configs").iterdir()} == {*PUBLISHED}


def test_the_command_counts_llama_without_torch_and_transformers():
    """Catches 6.15 G, those of a LongNetLM of these sizes, and a plan that takes seconds to import torch."""
    argv = ["plan", "model", "--config", str(DATA / "configs" / "Llama-3-8B.json"), "--seq-len", "128Ki"]
    argv += ["--segment-lengths", "2Ki", "128Ki", "--dilation-rates", "1", "16"]
    script = f"""
import sys
from ring_dilated_attention.commands import cli
assert cli.main({argv!r}) == 0
assert not {{"torch", "transformers"}} & {{*sys.modules}}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    counted = "counted as transformers' llama (feed-forward of three matrices, a head of its own): 8.03 G parameters"
    assert " ".join(done.stdout.split()).startswith(counted)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "w=131072, r=16; causal\n" in done.stdout


def memory_of(itemsize=4, activations="kept", **fields):
    shape = read_decoder(LLAMA | fields)[1]._replace(itemsize=itemsize)
    job = ModelJob(shape, DilatedPattern((64,), (1,), is_causal=True), 512, 1, Mesh())
    return model_memory(job, activations, TRAITS["cpu"])


@pytest.mark.parametrize(("itemsize", "norm_bytes"), [(4, 8), (2, 6)])
def test_memory_follows_the_widths_of_the_config(itemsize, norm_bytes):
    """Each of them moves what it should: positions times layers times the numbers that autograd saves."""
    plain, rows = memory_of(itemsize), 512 * 3
    for field, more, saved in (
        ("intermediate_size", 10, 4 * 10 * itemsize),  # gate, up, the activation and the product
        ("num_key_value_heads", 2, 2 * 2 * 16 * itemsize),  # key and value of two more heads of 16
    ):
        wider = memory_of(itemsize, **{field: LLAMA[field] + more})
        assert wider.activations - plain.activations == rows * saved
    own = memory_of(itemsize, head_dim=20)  # query, out, key and value: 12 heads, 4 wider
    assert own.activations - plain.activations == rows * 12 * 4 * itemsize + 512 * 4 * 4
    block = (2 + 2) * 64 * itemsize + 2 * (64 + 32) * itemsize - 2 * 64 * itemsize + 4 * 100 * itemsize
    block += 2 * 64 * norm_bytes + (4 + 2) * 4  # two norms, the log-sum-exp and the norms' scales
    ends = 64 * (norm_bytes + itemsize) + (1 + 16) * 4 + 16
    assert plain.activations == 512 * (3 * block + ends)
    assert memory_of(itemsize, vocab_size=200_000).working - plain.working > 512 * 200_000 * 4  # logits of a chunk
    tied = memory_of(itemsize, tie_word_embeddings=True)
    assert plain.parameters - tied.parameters == 64 * 1000 * 4
    assert plain.optimiser - tied.optimiser == 2 * 64 * 1000 * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, f"model_type = 'mamba' is not planned; these are: {', '.join(FAMILIES)}"),
        ({"model_type": None}, "model_type = None is not planned"),
        ({"model_type": ["llama"]}, "model_type = ['llama'] is not planned"),
        ({"num_local_experts": 8}, "num_local_experts = 8: models with this are not planned"),
        ({"n_routed_experts": 64}, "n_routed_experts = 64: models with this"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm = True: models with this"),
        ({"hidden_size": -1}, "hidden_size is -1: it must be an integer of at least 1"),
        ({"num_hidden_layers": [2]}, "num_hidden_layers is [2]: it must be an integer"),
        ({"vocab_size": True}, "vocab_size is True: it must be an integer"),
        ({"intermediate_size": None}, "intermediate_size is None: it must be an integer"),
        ({"head_dim": "16"}, "head_dim is 16: it must be an integer"),
        ({"model_type": "qwen3"}, "head_dim is absent: it must be an integer"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no': it must be true or false"),
        ({"num_attention_heads": 6}, "--embed-dim 64 over --heads 6 is a head dim of 10.6667"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key/value heads"),
        ({"hidden_size": 2**62}, "of 4,611,686,018,427,387,904 (feed-forward"),
        ({"dilated_attention": {"segment_lengths": [0], "dilation_rates": [1]}}, "segment_lengths must be at least 1"),
        ({"dilated_attention": {"segment_lengths": [8], "rates": [1]}}, "unexpected keyword argument 'rates'"),
    ],
)
def test_configs_that_do_not_serve(fields, message, tmp_path, capsys):
    assert plan(tmp_path, LLAMA | fields, *BRANCHES) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in LLAMA if name != "model_type"])
def test_a_size_that_is_missing_is_named(name, tmp_path, capsys):
    assert plan(tmp_path, {key: value for key, value in LLAMA.items() if key != name}, *BRANCHES) == 2
    assert f"{name} is absent: it must be an integer of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"), [("[1]", "holds no object of fields"), ("{", "cannot be read as JSON")]
)
def test_files_that_are_no_config(content, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert cli.main(["plan", "model", "--config", str(tmp_path), "--seq-len", "512", *BRANCHES]) == 2
    assert message in capsys.readouterr().err


def test_options_change_the_model_of_a_config(tmp_path, capsys):
    """As if the file said so."""
    found = []
    for config, more in (
        (LLAMA, ["--layers", "7", "--vocab", "50"]),
        (LLAMA | {"num_hidden_layers": 7, "vocab_size": 50}, []),
    ):
        assert plan(tmp_path, config, *BRANCHES, "--json", *more) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["counted_as"] == "llama"
    assert found[0]["num_parameters"] != read_decoder(LLAMA)[1].num_parameters


def test_a_config_gives_its_pattern(tmp_path, capsys):
    """As the integration saves it. A model of transformers decides that it is causal; options go first."""
    fields = {"segment_lengths": [64, 512], "dilation_rates": [1, 4], "phase": "blocked", "heads": "all"}
    assert plan(tmp_path, LLAMA | {"dilated_attention": fields}, "--json") == 0
    assert DilatedPattern(**json.loads(capsys.readouterr().out)["pattern"]) == DilatedPattern(**fields, is_causal=True)
    assert plan(tmp_path, LLAMA | {"dilated_attention": fields}, "--json", "--phase", "modulo") == 0
    assert json.loads(capsys.readouterr().out)["pattern"]["phase"] == "modulo"
    split = fields | {"phase": "modulo", "heads": "split"}
    assert plan(tmp_path, LLAMA | {"dilated_attention": split}, "--json") == 0
    assert json.loads(capsys.readouterr().out)["pattern"]["heads"] == "split"

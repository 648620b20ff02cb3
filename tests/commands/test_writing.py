"""What a trained model writes and how well it predicts: rda generate, rda evaluate, and a run as a model in Python."""

import io
import json
import math
import re
import shutil
import sys
import types
from shlex import split

import pytest
import torch
import torch.nn.functional as F
from pages import block

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands import generate as command
from ring_dilated_attention.commands.cli import main
from ring_dilated_attention.models import LongNetLM
from ring_dilated_attention.training import scoring
from ring_dilated_attention.training.data import Document
from ring_dilated_attention.training.loop import train
from ring_dilated_attention.training.options import Hyperparameters
from ring_dilated_attention.training.run import Run
from ring_dilated_attention.training.scoring import score

TEXT = b"".join(f"line {i} of the document, in some words\n".encode() for i in range(400))
NEVER = types.SimpleNamespace(requested=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of a few steps."""
    options = Hyperparameters(
        seq_len=96,
        steps=8,
        embed_dim=16,
        num_heads=2,
        segment_lengths=(8, 48),
        dilation_rates=(1, 3),
        warmup_steps=2,
        held_out_bytes=192,
        learning_rate=0.02,
    )
    path = tmp_path_factory.mktemp("runs") / "run"
    train(Run(options, Document(TEXT, "text", 96, 192), path), ContextParallel(), NEVER)
    return path


def test_a_run_is_a_model(folder):
    """Catches parameters that are not those of the checkpoint, and a configuration that is not the run's."""
    model = LongNetLM.from_run(folder)
    assert (model.config.segment_lengths, model.config.embed_dim) == ((8, 48), 16)
    tokens = torch.frombuffer(bytearray(TEXT[-96:]), dtype=torch.uint8).long()[None]
    assert model.loss(tokens).item() < 0.8 * math.log(256)  # it learnt something
    assert torch.equal(model(tokens), LongNetLM.from_run(str(folder))(tokens))


def test_the_pages_example(folder, capsys):
    """As it is written, with a folder that exists."""
    exec(block("docs/generation.md", "of a run").replace("runs/20250131-120000", str(folder)), {})
    assert len(capsys.readouterr().out) == 3 * 200


def test_the_pages_example_of_another_pattern(folder):
    example = block("docs/generation.md", "another pattern").replace(
        "runs/20250131-120000", str(folder)
    )
    exec(example, names := {})
    model, other = names["model"], names["other"]
    assert other.config.segment_lengths == (128, 4096)
    assert all(
        torch.equal(x, y) for x, y in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_what_is_no_run_is_refused(folder, tmp_path):
    """Catches a checkpoint that is damaged and yet a model, and a folder of somebody else's."""
    with pytest.raises(
        ValueError, match=r"there is no checkpoint in this folder; pass the folder of a run"
    ):
        LongNetLM.from_run(tmp_path)
    [whole] = folder.glob("checkpoint-*")
    damaged = shutil.copytree(whole, tmp_path / whole.name)
    [tensors] = damaged.glob("*.safetensors")
    tensors.write_bytes(b"not one")
    with pytest.raises(ValueError, match=r"\.safetensors is damaged: it has not the size"):
        LongNetLM.from_run(tmp_path)


def test_generate_writes_what_the_model_draws(folder, capsysbinary):
    assert (
        main(["generate", str(folder), "--prompt", "line 7", "--tokens", "40", "--seed", "3"]) == 0
    )
    out, err = capsysbinary.readouterr()
    drawn = LongNetLM.from_run(folder).generate([list(b"line 7")], 40, seed=3)
    assert out.decode() == bytes(int(x) for x in drawn).decode(errors="replace")
    assert re.fullmatch(
        r"\n40 tokens in \d+\.\d\d s; caches of [\d,]+ bytes\n",
        err.decode(),
    )


class Terminal(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal, self.shown = is_terminal, []

    def isatty(self):
        return self.is_terminal

    def flush(self):
        self.shown.append(self.getvalue())


def written_to(file, content, monkeypatch):
    """By `rda generate`, from a model that writes these bytes."""
    model = types.SimpleNamespace(
        make_caches=lambda *_, **__: [], generate=lambda *_, **__: [[byte] for byte in content]
    )
    monkeypatch.setattr(sys, "stdout", file)
    options = types.SimpleNamespace(tokens=len(content), temperature=1, seed=None)
    assert command.write(model, b"a", options) == 0
    monkeypatch.undo()
    return file.getvalue()


def test_text_comes_in_whole_characters(monkeypatch):
    """Catches half of a character, one that is held back although it is whole, and bytes that end the stream."""
    file = Terminal(False)
    assert written_to(file, "aé€😀".encode(), monkeypatch) == "aé€😀"
    shown = [x for i, x in enumerate(file.shown) if x and x not in file.shown[:i]]
    assert shown == ["a", "aé", "aé€", "aé€😀"]
    # no character; and the beginning of one that never ends
    assert written_to(Terminal(False), b"a\xff\xe2\x82", monkeypatch) == "a\ufffd\ufffd"


@pytest.mark.parametrize(
    ("is_terminal", "expected"), [(True, "a\ufffd[31m\t\nb\ufffd"), (False, "a\x1b[31m\t\nb\x07")]
)
def test_a_terminal_is_left_as_it_was(is_terminal, expected, monkeypatch):
    """Catches escape sequences of a byte-level model."""
    content = b"a\x1b[31m\t\nb\x07"
    assert written_to(Terminal(is_terminal), content, monkeypatch) == expected


def pipe_in(monkeypatch, content):
    monkeypatch.setattr(
        sys, "stdin", types.SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content)))
    )


def test_text_comes_from_a_file_or_a_pipe(folder, tmp_path, monkeypatch, capsys):
    """Also what is read: not an end of line more or less."""
    (tmp_path / "text").write_bytes(TEXT[:600])
    file = str(tmp_path / "text")
    pipe_in(monkeypatch, TEXT[:600])
    out = []
    for name in (file, "-"):
        words = ["generate", str(folder), "--prompt-file", name, *split("--tokens 5 --seed 1")]
        assert main(words) == 0
        out.append(capsys.readouterr().out)
    steps = LongNetLM.from_run(folder).generate([list(TEXT[:600])], 5, seed=1)
    assert out == [bytes(int(x) for x in steps).decode(errors="replace")] * 2
    pipe_in(monkeypatch, TEXT[:600])
    records = []
    for name in (file, "-"):
        assert main(["evaluate", str(folder), name, *split("--context 0 --json")]) == 0
        records.append(json.loads(capsys.readouterr().out))
    assert records[0] == records[1] | {"file": file}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate RUN --prompt ''", "the prompt is empty: the model goes on from one byte"),
        ("generate RUN --prompt a --tokens 0", "argument --tokens: must be at least 1, got 0"),
        ("generate RUN --prompt a --temperature -1", "temperature=-1.0 must be 0"),
        ("generate RUN --prompt-file nowhere", "cannot read nowhere: No such file"),
        ("generate nowhere --prompt a", "nowhere: there is no checkpoint in this folder"),
        ("evaluate RUN nowhere", "cannot read nowhere: No such file"),
        ("evaluate RUN /dev/null --context 1", "/dev/null: no context has 2 bytes"),
        ("evaluate RUN /dev/null --context -1", "argument --context: must be at least 0, got -1"),
    ],
)
def test_refusals(words, message, folder, capsys):
    name, *more = split(words)
    assert main([name, *(str(folder) if x == "RUN" else x for x in more)]) == 2
    assert capsys.readouterr().err.startswith(f"rda {name}: {message}")


def test_ctrl_c_ends_in_good_order(folder, capsys, monkeypatch):
    """Catches a traceback, and figures that are lost."""
    generate = LongNetLM.generate

    def interrupted(*args, **kwargs):
        for i, tokens in enumerate(generate(*args, **kwargs)):
            if i == 5:
                raise KeyboardInterrupt
            yield tokens

    monkeypatch.setattr(LongNetLM, "generate", interrupted)
    assert main(["generate", str(folder), "--prompt", "line", "--tokens", "100"]) == 130
    out, err = capsys.readouterr()
    assert err.startswith("\n5 tokens in ")
    assert err.endswith("\ninterrupted\n")
    assert out


# rda evaluate.


def bits_one_call(model, text):
    """The bits of every byte but the first, by one call without a cache."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[None]
    with torch.no_grad():
        logits = model(tokens)
    return F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none") / math.log(2)


def total(scores):
    """What was read, how much of it was predicted, and the bits."""
    return tuple(map(sum, zip(*scores, strict=True)))


@pytest.mark.parametrize("chunk", [1, 7, 50, 4096])
@pytest.mark.parametrize("context", [2, 50, 187, 186, 1000])
def test_bits_of_contexts_are_those_of_one_call_each(folder, chunk, context, monkeypatch):
    """Catches a byte that is predicted from the wrong one where a chunk ends, or from another context."""
    monkeypatch.setattr(scoring, "CHUNK", chunk)
    model, text = LongNetLM.from_run(folder), TEXT[:187]
    expected = []
    for start in range(0, len(text), context):
        if len(text) - start > 1:
            expected += bits_one_call(model, text[start : start + context]).tolist()
    num_read, num_predicted, bits = total(score(model, text, context))
    assert (num_read, num_predicted) == (len(text), len(expected))
    assert bits == pytest.approx(sum(expected), rel=1e-5)


def test_evaluate(folder, tmp_path, capsys):
    """Catches a context that is not that of training, and a sentence whose figures are not the record's."""
    (tmp_path / "text.txt").write_bytes(TEXT[:1000])
    arguments = ["evaluate", str(folder), str(tmp_path / "text.txt")]
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["context"] == 96
    assert record["num_bytes"] == 1000 - 11  # contexts of which the first byte is not predicted
    assert main(arguments) == 0
    assert capsys.readouterr().out == (
        f"{record['bits_per_byte']:.3f} bits per byte over 989 bytes, in contexts of 96 bytes\n"
    )
    assert main([*arguments, "--context", "0"]) == 0
    assert "999 bytes, in contexts of 1,000 bytes" in capsys.readouterr().out


def test_evaluating_holds_no_more_of_a_longer_text(folder, monkeypatch):
    """Catches a cache, a list or a graph that grows with the text."""
    from benchmarks.measure import allocated

    model = LongNetLM.from_run(folder)
    monkeypatch.setattr(scoring, "CHUNK", 50)
    for context in (1920, 96):
        # what only the first call makes is not the text's
        total(score(model, TEXT[:480], context))
        peaks = [
            allocated(
                lambda n=n, context=context: total(score(model, TEXT[:n], context))
            ).peak_bytes
            for n in (480, 1920)
        ]
        assert peaks[0] == peaks[1]

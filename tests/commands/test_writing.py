"""What a trained model writes and how well it predicts: rda generate, rda evaluate, and a run as a model in Python."""

import io
import json
import math
import re
import shutil
import sys
import types
from pathlib import Path
from shlex import split

import pytest
import torch
import torch.nn.functional as F
from pages import block
from transcripts import PREPARED, play

from benchmarks.measure import allocated
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
    sizes = {"seq_len": 96, "embed_dim": 16, "num_heads": 2, "held_out_bytes": 192}
    pattern = {"segment_lengths": (8, 48), "dilation_rates": (1, 3)}
    options = Hyperparameters(**sizes, **pattern, steps=8, warmup_steps=2, learning_rate=0.02)
    path = tmp_path_factory.mktemp("runs") / "run"
    train(Run(options, Document(TEXT, "text", 96, 192), path), ContextParallel(), NEVER)
    return path


def test_a_run_is_a_model(folder):
    """Catches parameters that are not those of the checkpoint, and a configuration that is not the run's."""
    model = LongNetLM.from_run(str(folder))
    assert (model.config.segment_lengths, model.config.embed_dim) == ((8, 48), 16)
    assert model.loss(tokens_of(TEXT[-96:])).item() < 0.8 * math.log(256)  # it learnt something


def names_of(example, folder):
    """Runs a page's block, as it is written, with a folder that exists."""
    names = {}
    exec(example.replace("runs/20250131-120000", str(folder)), names)
    return names


def test_the_pages_examples(folder, capsys):
    names_of(block("docs/generation.md", "of a run"), folder)
    assert len(capsys.readouterr().out) == 3 * 200
    names = names_of(block("docs/generation.md", "another pattern"), folder)
    model, other = names["model"], names["other"]
    assert other.config.segment_lengths == (128, 4096)
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(x, y)


def drawn(folder, prompt, num_tokens, seed):
    steps = LongNetLM.from_run(folder).generate([list(prompt)], num_tokens, seed=seed)
    return bytes(int(x) for x in steps).decode(errors="replace")


class Terminal(io.StringIO):
    shown = ()

    def flush(self):
        if self.getvalue() not in ("", *self.shown):
            self.shown += (self.getvalue(),)


WITH_AN_ESCAPE = b"a\x1b[31m\t\nb\x07"


@pytest.mark.parametrize(
    ("is_terminal", "content", "shown"),
    [
        (False, "aé€😀".encode(), ("a", "aé", "aé€", "aé€😀")),
        # no character; and the beginning of one that never ends
        (False, b"a\xff\xe2\x82", ("a\ufffd\ufffd",)),
        (True, WITH_AN_ESCAPE, ("a\ufffd[31m\t\nb\ufffd",)),
        (False, WITH_AN_ESCAPE, (WITH_AN_ESCAPE.decode(),)),
    ],
)
def test_text_comes_in_whole_characters(is_terminal, content, shown, monkeypatch):
    """From a model that writes these bytes. Catches half of a character, one that is held back although it is whole,
    bytes that end the stream, and escape sequences on a terminal."""
    model = types.SimpleNamespace(
        make_caches=lambda *_, **__: [], generate=lambda *_, **__: [[byte] for byte in content]
    )
    file = Terminal()
    file.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(LongNetLM, "from_run", lambda folder: model)
    options = types.SimpleNamespace(
        run_folder="run",
        prompt="a",
        prompt_file=None,
        tokens=len(content),
        temperature=1,
        seed=None,
    )
    assert command.run(options) == 0
    monkeypatch.undo()
    file.flush()
    assert file.shown[-len(shown) :] == shown


def test_text_comes_from_a_file_or_a_pipe(folder, tmp_path, monkeypatch, capsys):
    """Also what is read: not an end of line more or less."""
    file = tmp_path / "text"
    file.write_bytes(TEXT[:600])
    out = []
    for line in ("generate RUN --prompt-file FILE --tokens 5 --seed 1", "evaluate RUN FILE --json"):
        for name in (str(file), "-"):
            piped = io.BufferedReader(io.BytesIO(TEXT[:600]))
            monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=piped))
            assert main(line.replace("RUN", str(folder)).replace("FILE", name).split()) == 0
            out.append(capsys.readouterr().out)
    assert out[:2] == [drawn(folder, TEXT[:600], 5, 1)] * 2
    assert json.loads(out[2]) == json.loads(out[3]) | {"file": str(file)}


def test_ctrl_c_ends_in_good_order(folder, capsys, monkeypatch):
    """Catches a traceback, and figures that are lost."""
    generate = LongNetLM.generate

    def interrupted(*args, **kwargs):
        for i, tokens in enumerate(generate(*args, **kwargs)):
            if i == 5:
                raise KeyboardInterrupt
            yield tokens

    monkeypatch.setattr(LongNetLM, "generate", interrupted)
    words = ["generate", str(folder), "--prompt", "line 7", *split("--tokens 100 --seed 3")]
    assert main(words) == 130
    out, err = capsys.readouterr()
    assert re.fullmatch(r"\n5 tokens in \d+\.\d\d s; caches of [\d,]+ bytes\ninterrupted\n", err)
    monkeypatch.undo()
    assert out == drawn(folder, b"line 7", 5, 3)


# rda evaluate.


def tokens_of(text):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[None]


def bits_one_call(model, text):
    """The bits of every byte but the first, by one call without a cache."""
    tokens = tokens_of(text)
    with torch.no_grad():
        logits = model(tokens)
    return F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none") / math.log(2)


def total(scores):
    """What was read, how much of it was predicted, and the bits."""
    return tuple(map(sum, zip(*scores, strict=True)))


@pytest.mark.parametrize("chunk", [1, 7, 12, 4096])
@pytest.mark.parametrize("context", [2, 12, 46, 1000])
def test_bits_of_contexts_are_those_of_one_call_each(folder, chunk, context, monkeypatch):
    """Catches a byte that is predicted from the wrong one where a chunk ends, or from another context."""
    monkeypatch.setattr(scoring, "CHUNK", chunk)
    model, text = LongNetLM.from_run(folder), TEXT[:47]
    expected = []
    for start in range(0, len(text), context):
        if len(text) - start > 1:
            expected += bits_one_call(model, text[start : start + context]).tolist()
    num_read, num_predicted, bits = total(score(model, text, context))
    assert (num_read, num_predicted) == (len(text), len(expected))
    assert bits == pytest.approx(sum(expected), rel=1e-5)


def test_a_session(folder, tmp_path, monkeypatch, capsys):
    """Catches a context that is not that of training, and a sentence whose figures are not the record's."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "run")
    Path("text.txt").write_bytes(TEXT[:1000])
    printed = play(PREPARED / "writing.txt", capsys)
    bits, exact = re.findall(r"\b\d\.\d{3,}", printed)[:2]
    assert bits == f"{float(exact):.3f}"


def test_evaluating_holds_no_more_of_a_longer_text(folder, monkeypatch):
    """Catches a cache, a list or a graph that grows with the text."""
    model = LongNetLM.from_run(folder)
    monkeypatch.setattr(scoring, "CHUNK", 50)
    for context in (960, 96):
        # what only the first call makes is not the text's
        total(score(model, TEXT[:240], context))
        short, long = (
            allocated(lambda n=n, context=context: total(score(model, TEXT[:n], context)))
            for n in (240, 960)
        )
        assert short.peak_bytes == long.peak_bytes

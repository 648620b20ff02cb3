"""Recall at a distance: facts among filler, a question to each, and accuracy by distance and by reach.

A fact is one token, which names a key and a value. A question is one token, which names a key, and its answer is the
value. Each key has one fact and one question in a sequence, at a distance that is uniform in its logarithm. The answer
stands nowhere in the sequence, the loss is that of the questions alone, and every batch is drawn anew. So a model that
cannot hear of a fact is right once in `num_values`.
"""

import math
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from ring_dilated_attention.forecast.reach import every_query, reach
from ring_dilated_attention.models.longnet import LongNetLM
from ring_dilated_attention.pattern import DilatedPattern

from ..record import branches, markdown
from .kept import Row, Run
from .trainer import TIMED, Shape, Training, branches_of, one_thread

SUMMARY = "facts that are asked at log-uniform distances, by pattern"
NUM_FILLERS = 8
EVERY = 25  # steps of a point of the curve


class Settings(NamedTuple):
    """A pattern is made for each length that a run trains at, in turn; a lesson ends at `enough` or after its steps."""

    rules: tuple[str, ...]
    lengths: tuple[int, ...]
    most_steps: tuple[int, ...]
    seeds: tuple[int, ...]
    local: int = 32
    shape: Shape = Shape()
    num_keys: int = 4
    num_values: int = 4
    positions: int = 8192  # of a step
    enough: float = 0.99  # of the questions whose fact is within reach, over a point of the curve
    num_scored: int = 8192  # questions


RULES = ("local", "wide 4", "LongNet", "dense")
FULL = (
    Settings((*RULES, "wide 16"), (256,), (600,), (0, 1, 2)),
    Settings((*RULES, "wide 16"), (256, 2048), (600, 150), (0, 1, 2), num_scored=2048),
    Settings(("wide 4", "dense"), (256, 8192), (600, 200), (0,), num_scored=512),
)
QUICK = (Settings(("local", "dense"), (32,), (2,), (0,), 16, Shape(1, 16, 2), 2, 2, 128, 0.99, 64),)


class Batch(NamedTuple):
    tokens_BN: Tensor
    row_Q: Tensor  # of each question, its sequence, its place, that of its fact, and its answer
    question_Q: Tensor
    fact_Q: Tensor
    answer_Q: Tensor


def pattern_of(rule: str, seq_len: int, local: int) -> DilatedPattern:
    """`wide r` is one wide branch of rate r beside the local one."""
    if rule == "local":
        return DilatedPattern((local,), (1,), is_causal=True)
    if rule == "dense":
        return DilatedPattern((seq_len,), (1,), is_causal=True)
    if rule == "LongNet":
        return DilatedPattern.longnet(seq_len, first_length=local, is_causal=True)
    return DilatedPattern((local, seq_len), (1, int(rule.removeprefix("wide "))), is_causal=True)


def draw(settings: Settings, seq_len: int, number: int, generator: numpy.random.Generator) -> Batch:
    """`number` sequences. Tokens: facts (key * num_values + value), then questions by key, then fillers."""
    num_keys, num_values = settings.num_keys, settings.num_values
    first_question = num_keys * num_values
    first_filler = first_question + num_keys
    tokens = generator.integers(first_filler, first_filler + NUM_FILLERS, (number, seq_len))
    asked = []
    for row in range(number):
        taken: set[int] = set()
        for key, value in enumerate(generator.integers(num_values, size=num_keys).tolist()):
            fact, question = _places(seq_len, taken, generator)
            taken |= {fact, question}
            tokens[row, fact], tokens[row, question] = key * num_values + value, first_question + key
            asked.append((row, question, fact, value))
    return Batch(torch.from_numpy(tokens), *torch.tensor(asked).unbind(1))


def _places(seq_len: int, taken: set[int], generator: numpy.random.Generator) -> tuple[int, int]:
    while True:
        log, share = generator.random(2)
        distance = int(math.exp(log * math.log(seq_len)))
        fact = int(share * (seq_len - distance))
        if fact not in taken and fact + distance not in taken:
            return fact, fact + distance


def is_reached(pattern: DilatedPattern, seq_len: int, shape: Shape) -> numpy.ndarray:
    """(N, N) bool: whether the last layer's hidden state at query i has heard of position j."""
    layers = every_query(pattern, seq_len, shape.num_heads)
    [*_, last] = [sets for _, sets in zip(range(shape.num_layers), layers, strict=False)]
    num_bytes = -(-seq_len // 8)
    packed = numpy.frombuffer(b"".join(heard.to_bytes(num_bytes, "little") for heard in last), numpy.uint8)
    bits = numpy.unpackbits(packed.reshape(seq_len, num_bytes), axis=1, bitorder="little")
    return bits[:, :seq_len].astype(bool)


class Asker:
    """Draws batches, computes the loss of their answers, and counts the right ones by distance and by reach."""

    def __init__(self, settings: Settings, seq_len: int, pattern: DilatedPattern, seed: int) -> None:
        self.settings, self.seq_len = settings, seq_len
        self.reached_NN = torch.from_numpy(is_reached(pattern, seq_len, settings.shape))
        self.generator = numpy.random.default_rng([seed, seq_len])
        self.forget()

    def forget(self) -> None:
        # asked, right: by whether the fact is within reach, and by the power of two of the distance
        self.counts = torch.zeros(2, 2, self.seq_len.bit_length(), dtype=torch.int64)

    def loss(self, batch: Batch, model: LongNetLM) -> Tensor:
        logits_QV = model(batch.tokens_BN)[batch.row_Q, batch.question_Q, : self.settings.num_values]
        bucket_Q = (batch.question_Q - batch.fact_Q).double().log2().floor().long()
        is_right_Q = (logits_QV.argmax(-1) == batch.answer_Q).long()
        where = (self.reached_NN[batch.question_Q, batch.fact_Q].long(), bucket_Q)
        self.counts[0].index_put_(where, torch.ones_like(is_right_Q), accumulate=True)
        self.counts[1].index_put_(where, is_right_Q, accumulate=True)
        return F.cross_entropy(logits_QV, batch.answer_Q)

    def draw(self) -> Batch:
        return draw(self.settings, self.seq_len, max(1, self.settings.positions // self.seq_len), self.generator)

    def accuracy(self, reached: int | None = None) -> float | None:
        """Of all questions, or of those whose fact is within reach (1) or beyond it (0)."""
        asked, right = (found if reached is None else found[reached] for found in self.counts)
        return right.sum().item() / asked.sum().item() if asked.sum() else None


def run_one(settings: Settings, rule: str, seed: int) -> Row:
    with one_thread():
        task = settings._replace(rules=(), lengths=(), most_steps=(), seeds=(), num_scored=0)
        lessons = tuple(zip(settings.lengths, settings.most_steps, strict=True))
        model, told = trained(task, rule, seed, lessons)
        return {"stages": list(told), **score(settings, rule, model, seed)}


@cache
def trained(
    task: Settings, rule: str, seed: int, lessons: tuple[tuple[int, int], ...]
) -> tuple[LongNetLM, tuple[dict[str, Any], ...]]:
    """The model after lessons of a length and the most steps, each from the parameters of the one before. Runs of
    several lengths begin alike, so that a process trains at the first one once."""
    *before, (seq_len, most_steps) = lessons
    pattern = pattern_of(rule, seq_len, task.local)
    training = Training(task.shape, pattern, task.num_keys * (task.num_values + 1) + NUM_FILLERS, seed)
    told: tuple[dict[str, Any], ...] = ()
    if before:
        model, told = trained(task, rule, seed, tuple(before))
        training.model.load_state_dict(model.state_dict())
    found = train(training, Asker(task, seq_len, pattern, seed), most_steps)
    return training.model, (*told, branches_of(pattern) | {"seq_len": seq_len} | found)


def train(training: Training, asker: Asker, most_steps: int) -> dict[str, Any]:
    """Until enough is known of what is within reach, or for so many steps. Batches are new ones, so that accuracy in
    training is that on what was never seen."""
    curve = []
    while training.num_steps < most_steps:
        batch = asker.draw()
        training.step(partial(asker.loss, batch))
        if training.num_steps % EVERY == 0 or training.num_steps == most_steps:
            curve.append([training.num_steps, round(training.seconds, 3), asker.accuracy(), asker.accuracy(1)])
            asker.forget()
            if (curve[-1][3] or 0) >= asker.settings.enough:
                break
    return {"steps": training.num_steps, "cpu_seconds": round(training.seconds, 3), "curve": curve}


@torch.no_grad()
def score(settings: Settings, rule: str, model: LongNetLM, seed: int) -> Row:
    pattern, began = pattern_of(rule, settings.lengths[-1], settings.local), time.process_time()
    asker = Asker(settings, settings.lengths[-1], pattern, seed + 1_000_000)
    while asker.counts[0].sum() < settings.num_scored:
        asker.loss(asker.draw(), model)
    return {
        "accuracy": asker.accuracy(),
        "accuracy_within_reach": asker.accuracy(1),
        "accuracy_beyond_reach": asker.accuracy(0),
        "within_reach": int(asker.counts[0, 1].sum()) / int(asker.counts[0].sum()),
        # by the power of two of the distance: asked and right beyond reach, asked and right within it
        "by_distance": asker.counts.permute(2, 1, 0).flatten(1).tolist(),
        "scoring_cpu_seconds": round(time.process_time() - began, 3),
    }


def runs(cases: Sequence[Settings]) -> list[Run]:
    found = []
    for settings in cases:
        for seed in settings.seeds:
            for rule in settings.rules:
                kept = settings._asdict() | {"shape": vars(settings.shape), "rules": rule, "seeds": seed}
                name = f"{settings.lengths[-1]} {rule} seed {seed}"
                found.append(Run(name, kept, partial(run_one, settings, rule, seed)))
    return found


def point_name(row: Row) -> str:
    """The pattern of a row, as a picture names it."""
    rule, local = row["settings"]["rules"], row["settings"]["local"]
    names = {"local": f"local {local}", "dense": "dense", "LongNet": "LongNet's rule"}
    return names.get(rule, f"local {local} and {rule}")


def point_at(lesson: dict[str, Any], share: float) -> list[Any] | None:
    """The first point of the curve at which `share` of what is within reach is answered."""
    return next((point for point in lesson["curve"] if (point[3] or 0) >= share), None)


def table(rows: list[Row]) -> str:
    headers: tuple[str, ...] = ("pattern", "positions", "seed", "worst query", "within reach", "most by reach", "right")
    headers = (*headers, "right within", "right beyond", "90% after", "99% after", "CPU s a step", "steps in all")
    settings = rows[0]["settings"]
    shape, num_values, positions = settings["shape"], settings["num_values"], settings["positions"]
    said = (
        f"{settings['num_keys']} facts of {num_values} values in a sequence, each asked once, at a distance uniform in "
        f"its logarithm; chance is {1 / num_values:.2f}. Patterns are causal. A model has {shape['num_layers']} layers "
        f"of {shape['embed_dim']} with {shape['num_heads']} heads. A step reads {positions:,} positions.\n\n"
        "Worst query: the share of what came before that it can have heard of, by `rda suggest`. Within reach: "
        "questions whose fact the last layer can have heard of. Most by reach: all of those right, and the others by "
        "chance. 90% and 99%: steps and CPU seconds until so many of those within reach are right over "
        f"{EVERY} steps; at 99% a run ends. Longer sequences begin with the parameters that shorter ones left; the "
        f"costs are those of the last length. {TIMED}"
    )
    return f"{said}\n\n{markdown(headers, [_cells(row) for row in rows])}"


def _cells(row: Row) -> tuple[str, ...]:
    lesson, reached, settings = row["stages"][-1], row["within_reach"], row["settings"]
    pattern = DilatedPattern(lesson["segment_lengths"], lesson["dilation_rates"], is_causal=True)
    worst = reach(pattern, lesson["seq_len"], settings["shape"]["num_heads"], settings["shape"]["num_layers"]).shares[
        -1
    ]
    most = reached + (1 - reached) / settings["num_values"]
    cells = [f"{worst:.1%}", f"{reached:.3f}", f"{most:.3f}", f"{row['accuracy']:.3f}"]
    for share in (row["accuracy_within_reach"], row["accuracy_beyond_reach"]):
        cells.append("none" if share is None else f"{share:.3f}")
    for share in (0.9, 0.99):
        point = point_at(lesson, share)
        cells.append(f"{point[0]:,} ({point[1]:.0f} s)" if point else "not")
    steps = " + ".join(f"{each['steps']:,}" for each in row["stages"])
    name = "dense" if settings["rules"] == "dense" else branches(lesson)
    per_step = f"{lesson['cpu_seconds'] / lesson['steps']:.2f}"
    return name, f"{lesson['seq_len']:,}", str(settings["seeds"]), *cells, per_step, steps

"""Tiny models of transformers with random patterns: padded, packed and checkpointed; judged by transformers' own eager
attention under an explicit mask log M, and by each document computed alone. What cannot be is a ValueError.

B batch, N positions.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import tiny
import torch
from fuzz import Trial, broken, nothing
from fuzz_oracle import draw_pattern
from torch import Tensor
from torch.nn.functional import cross_entropy

from ring_dilated_attention import DilatedPattern, save_attention
from ring_dilated_attention.integrations.transformers import attention_function as ours
from ring_dilated_attention.integrations.transformers.config import FIELD, NAME, to_fields
from ring_dilated_attention.reference import multiplicity

NAMES = ["llama", "qwen3", "gpt_neox", "bert"]
HEADS, MOST_POSITIONS = tiny.SIZES["num_attention_heads"], 40
CHECKPOINTS: dict[str, dict[str, Any] | None] = {
    "no checkpoints": None,
    "checkpoints": {"use_reentrant": False},
    "reentrant checkpoints": {"use_reentrant": True},
    "checkpoints that save attention": {"use_reentrant": False, "context_fn": save_attention},
}
EXACT = 1e-9  # numbers are near 1, in float64; transformers' angles are float32, but the same ones
ROUNDED = 2e-5  # eager attention takes its softmax in float32
_models: dict[str, Any] = {}


class Sample(NamedTuple):
    """What a model is given, and the documents (row of the batch, first and last position) that it holds."""

    inputs: dict[str, Tensor]
    documents: list[tuple[int, int, int]]
    positions: Tensor  # (B, N), of every row

    @property
    def counts(self) -> Tensor:
        """(B, N), True in documents."""
        rows = torch.zeros_like(self.positions, dtype=torch.bool)
        for b, start, stop in self.documents:
            rows[b, start:stop] = True
        return rows


def prepare(folder: Path) -> None:
    pass


def try_case(rng: random.Random, folder: Path) -> Trial:
    return rng.choices([try_equal, try_refused], [4, 1])[0](rng)


def model_of(name: str, pattern: DilatedPattern, implementation: str = NAME) -> Any:
    """The same parameters for all patterns and implementations."""
    if name not in _models:
        _models[name] = tiny.make(name)
    model = _models[name]
    model.zero_grad()
    model.gradient_checkpointing_disable()
    model.set_attn_implementation(NAME)  # an eager model refuses a pattern
    setattr(model.config, FIELD, to_fields(pattern))
    model.set_attn_implementation(implementation)
    return model.eval()


def try_equal(rng: random.Random) -> Trial:
    name = rng.choice(NAMES)
    how = rng.choice(
        [
            "plain",
            "right",
            "right",
            "left",
            "both",
            "borders",
            "borders",
            "positions",
            "positions",
            "positions",
        ]
    )
    if name == "bert" and how == "positions":
        how = "borders"  # it hands no positions on
    sample, pattern = draw_sample(rng, how), draw_pattern(rng, HEADS)
    checkpoints = rng.choice([*CHECKPOINTS])
    caches = rng.choice([{}, {"use_cache": False}, {"use_cache": True}]) if name != "bert" else {}
    model = model_of(name, pattern)
    if CHECKPOINTS[checkpoints] is not None:
        model.train()
        model.gradient_checkpointing_enable(CHECKPOINTS[checkpoints])
        caches = {}
    labels = torch.randint(61, sample.positions.shape)
    counts = sample.counts
    found = learned(model, model(**sample.inputs, **caches).logits[counts], labels[counts])
    alone = model_of(name, pattern)
    logits = [logits_alone(alone, sample, document) for document in sample.documents]
    complaint = why_off("alone", found, learned(alone, torch.cat(logits), labels[counts]), EXACT)
    if complaint is None and is_covered(pattern, sample):
        eager = model_of(name, pattern, "eager")
        mask = mask_of(pattern, sample, is_causal=name != "bert")
        inputs = {
            "input_ids": sample.inputs["input_ids"],
            "position_ids": sample.positions,
            "attention_mask": mask,
        }
        expected = learned(eager, eager(**inputs).logits[counts], labels[counts])
        complaint = why_off("eager attention", found, expected, ROUNDED)
    told = {
        key: x.tolist() if key != "input_ids" else tuple(x.shape)
        for key, x in sample.inputs.items()
    }
    return Trial(f"{name}, {how}", f"{name}, {pattern}, {checkpoints}, {caches}, {told}", complaint)


def learned(model: Any, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Logits of documents, the loss, and the gradients of all parameters."""
    loss = cross_entropy(logits, labels)
    loss.backward()
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return {"logits": logits.detach(), "loss": loss.detach(), **grads}


def why_off(
    judge: str, found: dict[str, Tensor], expected: dict[str, Tensor], bound: float
) -> str | None:
    if found.keys() != expected.keys():
        return f"gradients of {found.keys() ^ expected.keys()} are there or not, beside {judge}"
    for name, x in expected.items():
        error = float((found[name] - x).abs().max()) if x.numel() else 0.0
        if not error <= bound * (1 + float(x.abs().max())):
            return f"{name} is off by {error:.1e} from {judge}, where numbers are up to {float(x.abs().max()):.1e}"
    return None


def logits_alone(model: Any, sample: Sample, document: tuple[int, int, int]) -> Tensor:
    """(N, V) of a document as a batch of its own, at its own positions."""
    b, start, stop = document
    ids, positions = (
        x[b : b + 1, start:stop] for x in (sample.inputs["input_ids"], sample.positions)
    )
    return model(input_ids=ids, position_ids=positions).logits[0]


def mask_of(pattern: DilatedPattern, sample: Sample, *, is_causal: bool) -> Tensor:
    """log M (B, H, N, N). What is in no document sees itself."""
    batch, seq_len = sample.positions.shape
    pattern = DilatedPattern(**to_fields(pattern), is_causal=is_causal)
    count = torch.zeros(batch, HEADS, seq_len, seq_len, dtype=torch.float64)
    for b, start, stop in sample.documents:
        count[b, :, start:stop, start:stop] = multiplicity(pattern, stop - start, HEADS).double()
    rest = torch.diag_embed((~sample.counts).double())[:, None]
    return (count + rest).log()


def is_covered(pattern: DilatedPattern, sample: Sample) -> bool:
    """Whether every query sees a key: of one that sees none eager attention makes NaN."""
    longest = max(stop - start for _, start, stop in sample.documents)
    return bool((multiplicity(pattern, longest, HEADS).sum(-1) > 0).all())


def draw_sample(rng: random.Random, how: str) -> Sample:
    seq_len = rng.choice([rng.randint(1, 8), rng.randint(1, MOST_POSITIONS)])
    batch = 1 if how == "borders" else rng.randint(1, 3)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    inputs = {"input_ids": torch.randint(1, 61, (batch, seq_len), generator=generator)}
    positions = torch.arange(seq_len).expand(batch, -1)
    if how in ("right", "left", "both"):
        lengths = [rng.randint(0 if b else 1, seq_len) for b in range(batch)]
        firsts = [
            {"right": 0, "left": seq_len - n, "both": rng.randint(0, seq_len - n)}[how]
            for n in lengths
        ]
        documents = [
            (b, start, start + length)
            for b, (start, length) in enumerate(zip(firsts, lengths, strict=True))
        ]
        documents = [document for document in documents if document[1] < document[2]]
        sample = Sample(inputs, documents, positions)
        inputs["attention_mask"] = sample.counts.to(
            rng.choice([torch.int64, torch.bool, torch.float32])
        )
        if rng.random() < 0.3:  # as generate counts them; where there is padding they mean nothing
            counted = (sample.counts.cumsum(1) - 1).clamp(min=0)
            inputs["position_ids"] = counted.masked_fill(~sample.counts, rng.choice([0, 1]))
            return sample._replace(positions=inputs["position_ids"])
        return sample
    if how == "plain":
        if rng.random() < 0.4:
            positions = positions + rng.randint(0, 9)
            inputs["position_ids"] = positions[:1] if rng.random() < 0.5 else positions
        if rng.random() < 0.4:
            inputs["attention_mask"] = torch.ones(batch, seq_len, dtype=torch.int64)
        return Sample(inputs, [(b, 0, seq_len) for b in range(batch)], positions)
    return draw_packed(rng, how, inputs)


def draw_packed(rng: random.Random, how: str, inputs: dict[str, Tensor]) -> Sample:
    """Documents side by side in each row, or alike in all rows."""
    batch, seq_len = inputs["input_ids"].shape
    rows = [borders_of(rng, seq_len) for _ in range(batch)]
    alike = how == "positions" and rng.random() < 0.3
    rows = [rows[0]] * batch if alike else rows
    positions = torch.stack([within(borders) for borders in rows])
    if how == "borders":
        inputs["cu_seq_lens_q"] = torch.tensor(rows[0], dtype=torch.int32)
        if rng.random() < 0.3:  # a collator may give the borders alone
            positions = torch.arange(seq_len)[None]
        else:
            inputs["position_ids"] = positions
    else:
        inputs["position_ids"] = positions[:1] if alike else positions
        if rng.random() < 0.3:
            inputs["attention_mask"] = torch.ones(batch, seq_len, dtype=torch.int64)
    documents = [
        (b, *pair) for b, borders in enumerate(rows) for pair in itertools.pairwise(borders)
    ]
    return Sample(inputs, documents, positions)


def borders_of(rng: random.Random, seq_len: int) -> list[int]:
    inner = (
        {rng.randint(1, seq_len - 1) for _ in range(rng.randint(0, 5))} if seq_len > 1 else set()
    )
    return [0, *sorted(inner), seq_len]


def within(borders: list[int]) -> Tensor:
    return torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(borders)])


def try_refused(rng: random.Random) -> Trial:
    """What no pattern can hold, or nobody could see, is told in a sentence."""
    name, n = rng.choice(NAMES), rng.randint(6, 20)
    model = model_of(name, draw_pattern(rng, HEADS))
    ids, ones = torch.randint(1, 61, (2, n)), torch.ones(2, n, dtype=torch.int64)
    holes, padded = ones.clone(), ones.clone()
    hole = rng.randint(1, n - 2)
    holes[1, hole] = 0
    padded[rng.randrange(2), rng.randint(1, n - 1) :] = 0
    packed = torch.cat([torch.arange(2), torch.arange(n - 2)])[None].expand(2, -1)
    cut = torch.tensor([0, hole, n], dtype=torch.int32)
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "holes": ({"attention_mask": holes}, "holes"),
        "borders of a batch": ({"cu_seq_lens_q": cut}, "batch"),
        "borders beside padding": (
            {"attention_mask": padded, "cu_seq_lens_q": cut},
            "cu_seq_lens_q",
        ),
        "borders of another length": (
            {"input_ids": ids[:1], "cu_seq_lens_q": cut + 1},
            "cu_seqlens",
        ),
        "borders of int64": ({"input_ids": ids[:1], "cu_seq_lens_q": cut.long()}, "int32"),
        "borders that fall": ({"input_ids": ids[:1], "cu_seq_lens_q": cut.flip(0)}, "cu_seqlens"),
        "a mask of four dims": (
            {"attention_mask": torch.zeros(2, 1, n, n, dtype=torch.float64)},
            "attention_mask",
        ),
        "a mask of three dims": (
            {"attention_mask": torch.zeros(2 * HEADS, n, n + 1).double()},
            "attention_mask",
        ),
    }
    if name != "bert":
        cases["packed beside padding"] = (
            {"attention_mask": padded_after(padded, 3), "position_ids": packed},
            "increase by 1",
        )
        cases["positions fall"] = (
            {"attention_mask": padded_after(padded, 3), "position_ids": packed.flip(1)},
            "increase by 1",
        )
    how = rng.choice([*cases])
    inputs, said = cases[how]
    try:
        model(**{"input_ids": ids, **inputs})
        complaint: str | None = "it is taken"
    except ValueError as error:
        complaint = None if said in str(error) else f"it says nothing of {said!r}: {error}"
    return Trial(f"refused, {how}", f"{name}, {how}, {n} positions", complaint)


def padded_after(mask: Tensor, least: int) -> Tensor:
    """At least so many rows are valid, and the last one of the batch's is not."""
    mask = mask.clone()
    mask[:, :least] = 1
    mask[0, -1] = 0
    return mask


def _take_padding(
    dilated: Callable[..., Tensor], rows: Any, valid: Tensor, position_ids: Tensor | None
) -> Tensor:
    return dilated(*rows)


def _one_document(position_ids: Tensor, batch: int, num_rows: int) -> None:
    return None


def _one_document_again(position_ids: Tensor, batch: int, num_rows: int) -> Tensor | None:
    """Within a backward, where layers are computed again."""
    is_backward = torch._C._current_graph_task_id() != -1
    return None if is_backward else _find_borders(position_ids, batch, num_rows)


def _without_borders(*rows: Tensor, cu_seqlens: Tensor | None = None, **options: Any) -> Any:
    return _dilated_attention(*rows, **options)


def _blocked(config: Any, window: int | None, *, is_causal: bool) -> DilatedPattern:
    pattern = _layer_pattern(config, window, is_causal=is_causal)
    return replace(pattern, phase="blocked", heads="all")


_find_borders, _layer_pattern = ours.find_borders, ours.layer_pattern
_dilated_attention = ours.dilated_attention
BREAKAGES: dict[str, Callable[[], Any]] = {
    "padding is attended": broken("_attend_padded", _take_padding, ours),
    "documents see each other": broken("find_borders", _one_document, ours),
    "documents are forgotten when a layer is computed again": broken(
        "find_borders", _one_document_again, ours
    ),
    "borders are dropped": broken("dilated_attention", _without_borders, ours),
    "phases are blocked": broken("layer_pattern", _blocked, ours),
    "holes are taken": broken("_check_one_run", nothing, ours),
    "documents beside padding are taken": broken("_check_one_document", nothing, ours),
    "borders beside padding are taken": broken("_check_no_borders", nothing, ours),
    "masks of any shape are taken": broken("_check_mask", nothing, ours),
}

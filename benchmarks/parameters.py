"""Parameters of public decoders: as `rda plan model` counts them from config.json, as published, and as built.

The configs are those of tests/data/configs. The models are built on torch's meta device, without memory, by
transformers; where it is not installed they are not built, and the record says so.
"""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.forecast.decoders import read_decoder

from .gate import GateError
from .record import markdown

SUMMARY = "parameters of public models, counted from config.json, published and built"
DATA = Path(__file__).parents[1] / "tests" / "data"
PUBLISHED: dict[str, int] = json.loads((DATA / "published_parameters.json").read_text())


class Settings(NamedTuple):
    names: tuple[str, ...] = tuple(PUBLISHED)


FULL = Settings()
QUICK = Settings(("Qwen2.5-7B", "Llama-3.2-1B"))


def num_steps(settings: Settings) -> int:
    return len(settings.names)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for name in settings.names:
        step(name)
        config = json.loads((DATA / "configs" / f"{name}.json").read_text())
        counted, built = read_decoder(config)[1].num_parameters, build(config)
        if counted != PUBLISHED[name] or built not in (None, counted):
            raise GateError(f"{name}: counted {counted:,}, published {PUBLISHED[name]:,}, built {built}")
        row = {"model": name, "family": config["model_type"], "counted": counted, "published": PUBLISHED[name]}
        rows.append(row | {"built": built})
    return rows


def build(config: dict[str, Any]) -> int | None:
    """The parameters of the model that transformers builds, or None if it is not installed."""
    if find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**fields))
    return sum(x.numel() for x in model.parameters())


def table(rows: list[dict[str, Any]]) -> str:
    figures = ("counted", "published", "built")
    lines = [
        (row["model"], row["family"], *("-" if row[name] is None else f"{row[name]:,}" for name in figures))
        for row in rows
    ]
    return (
        "Parameters, those of a shared matrix once. Built: as transformers builds the model on torch's meta device; - "
        "if it was not installed.\n\n" + markdown(("model", "model_type", *figures), lines)
    )

"""`rda plan model`: ranks the meshes of some GPUs for the training of a model, by tokens per second."""

import argparse
import json
from pathlib import Path
from typing import Any

from ...forecast.call_cost import ERRORS_TEXT, MOST_TIMED
from ...forecast.clock import time_text
from ...forecast.meshes import MeshPlan, Training, ranked_meshes
from ...forecast.model_weight import ACTIVATIONS, Decoder
from ...models.longnet_config import LongNetConfig
from ...pattern import DilatedPattern
from ..arguments import check_at_least, check_given, count
from ..console import as_plain, counted, progress, scaled, size_text, table, wrapped
from ..hardware import ITEMSIZE, Machine, assumed, machine_for
from .decoders import FIELDS, encoder_decoder, longnet_decoder, read_config, transformers_decoder
from .job_options import SUGGEST, add_shared, complete, needed_of_pattern, pattern_of

EXAMPLES = f"""examples:
  rda plan model --layers 24 --embed-dim 2048 --heads 16 --vocab 32K \\
                 --seq-len 1Mi --segment-lengths 2Ki 128Ki \\
                 --dilation-rates 1 16 --gpus 32
      all meshes of 32 H100 by tokens per second, and what a GPU holds
  rda plan model --config Llama-3-8B/config.json --seq-len 128Ki ...
      a model of transformers

The model is made without data, its blocks are run forward and backward, and what they hold is weighed. If more than
{MOST_TIMED} GPUs share a sequence, memory and time of the attention are estimates (docs/planning.md).
"""
MOST_GPUS = 1024
DEFAULT_HARDWARE = "h100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=count, default=1, metavar="P", help="rank all meshes of so many (default 1)")
    add("--layers", type=count, metavar="L", help="transformer blocks")
    add("--embed-dim", type=count, metavar="E", help="width of the model")
    add("--ffn-dim", type=count, metavar="F", help="width of the feed-forward layer (default 4 E)")
    add("--vocab", type=count, metavar="V", help="size of the vocabulary (default 256, bytes)")
    add("--config", type=Path, metavar="PATH", help="a Hugging Face config.json")
    encoder = "an encoder (LongNetEncoder): a query sees later keys too"
    add("--not-causal", dest="is_causal", action="store_false", help=encoder)
    add_shared(parser)
    how = "how they are held (default: the fastest way that fits)"
    add("--activations", choices=ACTIVATIONS, help=how)


def run(arguments: argparse.Namespace) -> int:
    """Print the ranking. Raises ValueError for a model that is not possible."""
    fields = fill_in(arguments)
    complete(arguments)
    check_at_least("--gpus", arguments.gpus, most=MOST_GPUS)
    arguments.hardware = arguments.hardware or DEFAULT_HARDWARE
    machine = machine_for(arguments)
    assert machine is not None
    memory_bytes = machine.memory_bytes
    if memory_bytes is None:
        raise ValueError("the memory of a GPU is not known: give --memory, such as 80G")
    pattern = pattern_of(arguments, is_causal=arguments.is_causal)
    decoder = decoder_of(arguments, fields, pattern)
    itemsize = ITEMSIZE[arguments.dtype]
    activations = ACTIVATIONS if arguments.activations is None else (arguments.activations,)
    training = Training(
        decoder,
        pattern,
        arguments.seq_len,
        arguments.batch,
        itemsize,
        machine.kernel,
        activations,
    )
    with progress(None, "mesh") as bar:
        plans = ranked_meshes(training, arguments.gpus, machine.hardware, memory_bytes, bar.update)
    if arguments.json:
        named = {"counted_as": decoder.name, "num_parameters": decoder.num_parameters}
        named |= {"kernel": machine.kernel, "assumed": assumed(machine), "meshes": as_plain(plans)}
        print(json.dumps(named, indent=1))
    else:
        print(text(arguments, training, machine, memory_bytes, plans))
    return 0


def fill_in(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Take from --config what no option gives. Returns the fields of a config.json, with those of options."""
    fields: dict[str, Any] | None = None
    if arguments.config is not None:
        fields = read_config(arguments.config)
        for option, name in FIELDS.items():
            if getattr(arguments, option) is not None:
                fields[name] = getattr(arguments, option)
        values = {option: fields.get(name) for option, name in FIELDS.items()}
        saved = dict(fields.get("dilated_attention") or {})
        arguments.split_heads |= saved.pop("heads", None) == "split"
        values |= saved
        for option, value in values.items():
            if getattr(arguments, option, None) is None:
                setattr(arguments, option, value)
    remedy = "a model needs --layers and --embed-dim, or --config; "
    if fields is not None:
        remedy = ""
    check_given(
        arguments,
        ("layers", "embed_dim", "seq_len", *needed_of_pattern(arguments)),
        remedy + SUGGEST,
    )
    return fields


def decoder_of(
    arguments: argparse.Namespace, fields: dict[str, Any] | None, pattern: DilatedPattern
) -> Decoder:
    if not arguments.is_causal and (fields is not None or arguments.kv_heads != arguments.heads):
        raise ValueError("--not-causal is for a LongNetEncoder: leave out --config and --kv-heads")
    if fields is not None:
        return transformers_decoder(fields, pattern)
    if not arguments.is_causal:
        return encoder_decoder(
            pattern,
            arguments.vocab or 256,
            num_layers=arguments.layers,
            embed_dim=arguments.embed_dim,
            num_heads=arguments.heads,
            ffn_dim=arguments.ffn_dim or 4 * arguments.embed_dim,
        )
    rules = {name: value for name, value in pattern.as_dict().items() if name != "is_causal"}
    config = LongNetConfig(
        **rules,
        vocab_size=arguments.vocab or 256,
        num_layers=arguments.layers,
        embed_dim=arguments.embed_dim,
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        ffn_dim=arguments.ffn_dim,
    )
    return longnet_decoder(config)


def text(
    arguments: argparse.Namespace,
    training: Training,
    machine: Machine,
    memory_bytes: int,
    plans: list[MeshPlan],
) -> str:
    best, decoder = plans[0], training.decoder
    branches = "; ".join(map(str, training.pattern.branches))
    causal = "causal" if arguments.is_causal else "not causal"
    lines = [
        answer(memory_bytes, best),
        f"{decoder.name} of {scaled(decoder.num_parameters, '')} parameters, activations in {arguments.dtype}; "
        f"{training.seq_len:,} positions, batch {training.batch}; pattern: {branches}; {causal}",
    ]
    paragraphs = [
        *map(wrapped, lines),
        "",
        table_of_meshes(plans),
        "",
        table_of_best(best),
        "",
    ]
    paragraphs.append(wrapped(assumed(machine)))
    if any(plan.is_about for plan in plans):
        paragraphs.append(wrapped(ERRORS_TEXT))
    return "\n".join(paragraphs)


def answer(memory_bytes: int, best: MeshPlan) -> str:
    """The first line: which mesh, or that none fits."""
    mesh, memory = best.mesh, size_text(best.memory.total)
    gpus = counted(mesh.num_ranks, "GPU")
    if not best.fits:
        return f"It does not fit on {gpus} of {size_text(memory_bytes)}: the least, {mesh}, holds {memory}. Take more."
    if mesh.num_ranks == 1:
        return f"One GPU is enough: it holds {memory} of {size_text(memory_bytes)}."
    if mesh.sequence == 1:
        whole = f"each of {gpus} trains on sequences of its own (mesh {mesh})"
        return f"No sharing of sequences is needed: {whole}, and holds {memory}."
    shared = f"{mesh.sequence} GPUs share each sequence"
    return f"Take the mesh {mesh}: {shared}, by {best.exchange} with {best.sharding} shards; a GPU holds {memory}."


def table_of_meshes(plans: list[MeshPlan]) -> str:
    headers = (
        "mesh",
        "exchange",
        "shards",
        "activations",
        "states",
        "a GPU\nholds",
        "a step",
        "tokens/s",
    )
    rows = []
    for plan in plans:
        exchange, sharding = str(plan.exchange), plan.sharding
        if plan.mesh.sequence == 1:
            exchange, sharding = "", ""
        about = "about " if plan.is_about else ""
        states = "cut (FSDP)" if plan.is_cut else "whole"
        cells = [
            str(plan.mesh),
            exchange,
            sharding,
            plan.activations,
            states,
            size_text(plan.memory.total),
        ]
        if plan.fits:
            cells += [
                about + time_text(plan.seconds),
                about + scaled(plan.tokens_per_second, ""),
            ]
        else:
            cells += ["no room", ""]
        rows.append(tuple(cells))
    return table(headers, rows, num_left=5)


def table_of_best(best: MeshPlan) -> str:
    """What a GPU of the first mesh holds, and what its step takes."""
    memory = best.memory
    rows = [
        (name, size_text(getattr(memory, name))) for name in memory._fields if getattr(memory, name)
    ]
    rows += [
        ("products with weights", time_text(best.matrices_seconds)),
        ("attention", time_text(best.attention_seconds)),
        ("sum of gradients", time_text(best.gradients_seconds)),
    ]
    return table((f"mesh {best.mesh}", ""), rows)

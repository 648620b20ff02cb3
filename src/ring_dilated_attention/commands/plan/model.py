"""`rda plan model`: ranks the meshes of some GPUs for the training of a model, by tokens per second."""

import argparse
import json
from pathlib import Path
from typing import Any

from ...forecast.call_cost import ERRORS_TEXT, FLOPS_PER_PAIR, MOST_TIMED, pairs
from ...forecast.clock import time_text
from ...forecast.meshes import MeshPlan, Training, fewest_devices, ranked_meshes
from ...forecast.model_weight import ACTIVATIONS, Decoder
from ...models.longnet_config import LongNetConfig
from ...models.saved_run import find_checkpoint, read_state
from ...pattern import DilatedPattern
from ..arguments import LARGEST, amount, check_at_least, check_given, count
from ..console import counted, progress, scaled, size_text, table, wrapped
from ..hardware import ITEMSIZE, NO_NETWORK, Machine, described, machine_for, machine_of
from .decoders import FIELDS, longnet_decoder, read_config, transformers_decoder
from .job_options import SUGGEST, add_shared, complete, kernel_of, pattern_of

EXAMPLES = f"""examples:
  rda plan model --layers 24 --embed-dim 2048 --heads 16 --vocab 32K \\
                 --seq-len 1Mi --segment-lengths 2Ki 128Ki \\
                 --dilation-rates 1 16 --gpus 32 --tokens 1e11
      all meshes of 32 H100 by tokens per second, and what a GPU holds
  the same without --gpus
      the fewest GPUs on which the model fits
  rda plan model --config Llama-3-8B/config.json --seq-len 128Ki ...
      a model of transformers

The model is made without data, its blocks are run forward and backward, and what they hold is weighed. If more than
{MOST_TIMED} GPUs share a sequence, memory and time of the attention are estimates (docs/planning.md).
"""
MOST_GPUS = 1024
MOST_PARAMETERS = 10**15  # a thousand times those of the largest models: more is a typing mistake
DEFAULT_HARDWARE = "h100"
# The hyperparameters of a run that say what these options say.
_OF_A_RUN = {
    "layers": "num_layers",
    "embed_dim": "embed_dim",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
}
_OF_A_RUN |= {name: name for name in ("segment_lengths", "dilation_rates", "seq_len")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--gpus",
        type=count,
        metavar="P",
        help="rank all meshes of so many (default: the fewest that suffice)",
    )
    add("--layers", type=count, metavar="L", help="transformer blocks")
    add("--embed-dim", type=count, metavar="E", help="width of the model")
    add("--ffn-dim", type=count, metavar="F", help="width of the feed-forward layer (default 4 E)")
    add("--vocab", type=count, metavar="V", help="size of the vocabulary (default 256, bytes)")
    add("--config", type=Path, metavar="PATH", help="a Hugging Face config.json, or a run's folder")
    add_shared(parser)
    add("--dtype", choices=ITEMSIZE, help="of activations (default that of --hardware)")
    add(
        "--activations",
        choices=ACTIVATIONS,
        help="how they are held (default: the fastest way that fits)",
    )
    add(
        "--tokens",
        type=amount,
        metavar="T",
        help="tokens of the training, such as 1e11: shows its time",
    )
    parser.set_defaults(ranks=None)


def run(arguments: argparse.Namespace) -> int:
    """Print the ranking. Raises ValueError for a model that is not possible."""
    if arguments.tokens is not None and not 1 <= arguments.tokens <= LARGEST:
        raise ValueError(f"--tokens must be from 1 to {LARGEST:,}, got {arguments.tokens:g}")
    fields = fill_in(arguments)
    complete(arguments)
    if arguments.gpus is not None:
        check_at_least("--gpus", arguments.gpus, most=MOST_GPUS)
    machine, memory_bytes = machine_with_memory(arguments)
    pattern = pattern_of(arguments, is_causal=True)
    decoder = decoder_of(arguments, fields, pattern)
    itemsize = ITEMSIZE[arguments.dtype]
    kernel = kernel_of(arguments, machine)
    activations = ACTIVATIONS if arguments.activations is None else (arguments.activations,)
    training = Training(
        decoder, pattern, arguments.seq_len, arguments.batch, itemsize, kernel, activations
    )
    with progress(None, "candidate") as bar:
        if arguments.gpus is None:
            most = 1 if machine.hardware.bytes_per_second == NO_NETWORK else MOST_GPUS
            plans = fewest_devices(
                training, machine.hardware, memory_bytes, machine.most_ranks or most
            )
        else:
            plans = ranked_meshes(
                training, arguments.gpus, machine.hardware, memory_bytes, bar.update
            )
    if plans is None:
        much = (
            f"{scaled(decoder.num_parameters, '')} parameters and {arguments.seq_len:,} positions"
        )
        raise ValueError(
            f"{much} fit on no number of GPUs up to {machine.most_ranks or most:,} of this hardware"
        )
    if arguments.json:
        print(json.dumps(as_json(training, machine, plans), indent=1))
    else:
        print(text(arguments, training, machine, memory_bytes, plans))
    return 0


def machine_with_memory(arguments: argparse.Namespace) -> tuple[Machine, int]:
    """The hardware, by default DEFAULT_HARDWARE, and the memory of a GPU; fills in --dtype."""
    if arguments.hardware is None and arguments.flops is None:
        arguments.hardware = DEFAULT_HARDWARE
    if arguments.dtype is None:
        itemsize = 4 if arguments.hardware is None else machine_of(arguments.hardware).itemsize
        arguments.dtype = "bfloat16" if itemsize == 2 else "float32"
    machine = machine_for(arguments, arguments.gpus or 1)
    assert machine is not None
    if machine.memory_bytes is None:
        raise ValueError("the memory of a GPU is not known: give --memory, such as 80G")
    return machine, machine.memory_bytes


def fill_in(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Take from --config what no option gives. Returns the fields of a config.json, with those of options."""
    fields: dict[str, Any] | None = None
    if arguments.config is not None:
        checkpoint = find_checkpoint(arguments.config) if arguments.config.is_dir() else None
        if checkpoint is not None:
            hyperparameters = read_state(checkpoint)["hyperparameters"]
            values = {option: hyperparameters.get(name) for option, name in _OF_A_RUN.items()}
        else:
            fields = read_config(arguments.config)
            for option, name in FIELDS.items():
                if getattr(arguments, option) is not None:
                    fields[name] = getattr(arguments, option)
            values = {option: fields.get(name) for option, name in FIELDS.items()}
            values |= fields.get("dilated_attention") or {}
        for option, value in values.items():
            if getattr(arguments, option, None) is None:
                setattr(arguments, option, value)
    remedy = "a model needs --layers and --embed-dim, or --config; "
    if fields is not None:
        remedy = ""
    check_given(
        arguments,
        ("layers", "embed_dim", "seq_len", "segment_lengths", "dilation_rates"),
        remedy + SUGGEST,
    )
    return fields


def decoder_of(
    arguments: argparse.Namespace, fields: dict[str, Any] | None, pattern: DilatedPattern
) -> Decoder:
    size = arguments.layers * arguments.embed_dim**2 + arguments.embed_dim * (
        arguments.vocab or 256
    )
    if size > MOST_PARAMETERS:
        width = f"{arguments.layers:,} layers of {arguments.embed_dim:,}"
        raise ValueError(
            f"a model of {width} has more than {MOST_PARAMETERS:.0e} parameters: give smaller sizes"
        )
    if fields is not None:
        return transformers_decoder(fields, pattern)
    config = LongNetConfig(
        tuple(pattern.segment_lengths),
        tuple(pattern.dilation_rates),
        vocab_size=arguments.vocab or 256,
        num_layers=arguments.layers,
        embed_dim=arguments.embed_dim,
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        ffn_dim=arguments.ffn_dim,
        phase=pattern.phase,
        heads=pattern.heads,
    )
    return longnet_decoder(config)


def flops_of_step(training: Training, plan: MeshPlan) -> int:
    """The useful FLOPs of all GPUs: 6 for each token and matrix entry, 14 D for each pair of a query and a key."""
    decoder, sequences = training.decoder, training.batch * plan.mesh.data
    num_pairs = pairs(training.pattern, training.seq_len, decoder.num_heads) * sequences
    attention = decoder.num_layers * FLOPS_PER_PAIR * decoder.head_dim * num_pairs
    return 6 * sequences * training.seq_len * decoder.matrix_entries + attention


def as_json(training: Training, machine: Machine, plans: list[MeshPlan]) -> dict[str, Any]:
    rows = []
    for plan in plans:
        row = plan._asdict() | {"mesh": plan.mesh._asdict(), "exchange": plan.exchange._asdict()}
        row |= {
            "memory": plan.memory._asdict() | {"total": plan.memory.total},
            "seconds": plan.seconds,
        }
        rows.append(row | {"flops": flops_of_step(training, plan)})
    return {
        "counted_as": training.decoder.name,
        "num_parameters": training.decoder.num_parameters,
        "kernel": training.kernel,
        "assumed": described(machine.hardware, machine.source),
        "meshes": rows,
    }


def text(
    arguments: argparse.Namespace,
    training: Training,
    machine: Machine,
    memory_bytes: int,
    plans: list[MeshPlan],
) -> str:
    best, decoder = plans[0], training.decoder
    branches = "; ".join(map(str, training.pattern.branches))
    lines = [
        answer(memory_bytes, best),
        f"{decoder.name} of {scaled(decoder.num_parameters, '')} parameters, activations in {arguments.dtype}; "
        f"{training.seq_len:,} positions, batch {training.batch}; pattern: {branches}; causal",
    ]
    paragraphs = [
        *map(wrapped, lines),
        "",
        table_of_meshes(arguments, plans),
        "",
        table_of_best(best),
        "",
    ]
    paragraphs.append(wrapped(described(machine.hardware, machine.source)))
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


def table_of_meshes(arguments: argparse.Namespace, plans: list[MeshPlan]) -> str:
    headers = [
        "mesh",
        "exchange",
        "shards",
        "activations",
        "states",
        "a GPU\nholds",
        "a step",
        "tokens/s",
    ]
    if arguments.tokens is not None:
        headers.append(f"{arguments.tokens:.3g}\ntokens")
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
            if arguments.tokens is not None:
                cells.append(about + time_text(arguments.tokens / plan.tokens_per_second))
        else:
            cells += ["no room", *[""] * (len(headers) - len(cells) - 1)]
        rows.append(tuple(cells))
    return table(tuple(headers), rows, num_left=5)


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

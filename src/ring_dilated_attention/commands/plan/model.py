"""`rda plan model`: lists the meshes that a given number of GPUs can form. Meshes that fit the memory come first. Of
these, the mesh with the most tokens per second in training is at the top."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...forecast.call_cost import MOST_TIMED
from ...forecast.clock import time_text
from ...forecast.meshes import MeshPlan, Training, ranked_meshes
from ...forecast.model_weight import ACTIVATIONS, Decoder
from ...models.longnet_config import LongNetConfig
from ...pattern import DilatedPattern
from ...training.options import flag
from ..arguments import MOST_ENTRIES, MOST_HEADS, within
from ..console import as_plain, progress, scaled, size_text, table, wrapped
from ..hardware import ITEMSIZE, assumed, machine_for
from .decoders import encoder_decoder, longnet_decoder, transformers_decoder
from .job_options import add_shared, pattern_of

EXAMPLES = f"""examples:
  rda plan model --layers 24 --embed-dim 2048 --heads 16 --vocab 32K \\
                 --seq-len 1Mi --segment-lengths 2Ki 128Ki \\
                 --dilation-rates 1 16 --gpus 32
      all meshes of 32 H100 by tokens per second, and what a GPU holds
  rda plan model --config Llama-3-8B/config.json --seq-len 128Ki \\
                 --segment-lengths 2Ki 128Ki --dilation-rates 1 16
      a model of transformers

The model is made without data, its blocks are run forward and backward, and
what they hold is weighed. Meshes in which more than {MOST_TIMED} GPUs share a
sequence are not planned (docs/planning.md).
"""
MOST_GPUS = 1024
DEFAULT_HARDWARE = "h100"
# The options for the sizes of a model. --config gives all sizes, so these options are refused together with --config.
SIZES = ("layers", "embed_dim", "ffn_dim", "vocab", "heads", "kv_heads")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--gpus",
        type=within(1, MOST_GPUS),
        default=1,
        metavar="P",
        help="rank all meshes of so many (default 1)",
    )
    size = within(1, MOST_ENTRIES)
    heads = within(1, MOST_HEADS)
    add("--layers", type=size, metavar="L", help="transformer blocks")
    add("--embed-dim", type=size, metavar="E", help="width of the model")
    add("--ffn-dim", type=size, metavar="F", help="width of the feed-forward layer (default 4 E)")
    add("--vocab", type=size, metavar="V", help="size of the vocabulary (default 256, bytes)")
    add("--heads", type=heads, metavar="H", help="query heads (default 12)")
    add("--kv-heads", type=heads, metavar="G", help="key/value heads (default as many)")
    add("--config", type=Path, metavar="PATH", help="a Hugging Face config.json, with all sizes")
    add(
        "--not-causal",
        dest="is_causal",
        action="store_false",
        help="an encoder (LongNetEncoder): a query sees later keys too",
    )
    add(
        "--activations",
        choices=ACTIVATIONS,
        help="keep the activations, or compute them again (default: what is faster and fits)",
    )
    add_shared(parser)


def run(arguments: Namespace) -> int:
    """Print the sorted meshes. Raises ValueError if the model is impossible."""
    arguments.hardware = arguments.hardware or DEFAULT_HARDWARE
    machine = machine_for(arguments)
    assert machine is not None
    memory_bytes = machine.memory_bytes
    if memory_bytes is None:
        raise ValueError("the memory of a GPU is not known: give --memory, such as 80G")
    pattern = pattern_of(arguments, is_causal=arguments.is_causal)
    decoder = decoder_of(arguments, pattern)
    training = Training(
        decoder,
        pattern,
        arguments.seq_len,
        arguments.batch,
        ITEMSIZE[machine.dtype],
        machine.kernel,
    )
    if arguments.activations is not None:
        training = training._replace(activations=(arguments.activations,))
    with progress(None, "plan") as bar:
        plans = ranked_meshes(training, arguments.gpus, machine.hardware, memory_bytes, bar.update)
    if arguments.json:
        named = {
            "counted_as": decoder.name,
            "num_parameters": decoder.num_parameters,
            "kernel": machine.kernel,
            "assumed": assumed(machine),
            "meshes": as_plain(plans),
        }
        print(json.dumps(named, indent=1))
        return 0
    branches = "; ".join(map(str, pattern.branches))
    model = f"{decoder.name} of {scaled(decoder.num_parameters, '')} parameters"
    print(wrapped(answer(memory_bytes, plans[0])))
    print(wrapped(f"{model}, activations in {machine.dtype}; pattern: {branches}"))
    print(f"\n{table_of_meshes(plans)}\n\n{table_of_best(plans[0])}\n")
    print(wrapped(assumed(machine)))
    return 0


def decoder_of(arguments: Namespace, pattern: DilatedPattern) -> Decoder:
    given = [flag(name) for name in SIZES if getattr(arguments, name) is not None]
    if arguments.config is not None:
        if not arguments.is_causal:
            given.append("--not-causal")
        if given:
            raise ValueError(f"--config gives these already: leave out {', '.join(given)}")
        return transformers_decoder(arguments.config, pattern)
    if arguments.layers is None or arguments.embed_dim is None:
        raise ValueError("a model needs --layers and --embed-dim, or --config")
    vocab_size = arguments.vocab or 256
    sizes = dict(
        num_layers=arguments.layers,
        embed_dim=arguments.embed_dim,
        num_heads=arguments.heads or 12,
    )
    if not arguments.is_causal:
        if arguments.kv_heads is not None:
            raise ValueError("--not-causal makes a LongNetEncoder, which has no --kv-heads")
        return encoder_decoder(
            pattern,
            vocab_size,
            **sizes,
            ffn_dim=arguments.ffn_dim or 4 * arguments.embed_dim,
        )
    rules = pattern.as_dict()
    del rules["is_causal"]
    config = LongNetConfig(
        **rules,
        **sizes,
        vocab_size=vocab_size,
        num_kv_heads=arguments.kv_heads,
        ffn_dim=arguments.ffn_dim,
    )
    return longnet_decoder(config)


def answer(memory_bytes: int, best: MeshPlan) -> str:
    """The sentence that is printed first: which mesh to take, or that none fits."""
    mesh, memory = best.mesh, size_text(best.memory.total)
    if not best.fits:
        return (
            f"It does not fit on {mesh.num_ranks} x {size_text(memory_bytes)}: the least, mesh {mesh}, holds {memory} "
            "on a GPU. Take more."
        )
    if mesh.num_ranks == 1:
        return f"One GPU is enough: it holds {memory} of {size_text(memory_bytes)}."
    if mesh.sequence == 1:
        return (
            f"No sharing of sequences is needed: each of {mesh.num_ranks} GPUs trains on sequences of its own "
            f"(mesh {mesh}), and holds {memory}."
        )
    return (
        f"Take the mesh {mesh}: {mesh.sequence} GPUs share each sequence, by {best.exchange} with {best.sharding} "
        f"shards; a GPU holds {memory}."
    )


def table_of_meshes(plans: list[MeshPlan]) -> str:
    rows = []
    for plan in plans:
        exchange, sharding = str(plan.exchange), plan.sharding
        if plan.mesh.sequence == 1:
            exchange, sharding = "", ""
        seconds, speed = "no room", ""
        if plan.fits:
            seconds, speed = time_text(plan.seconds), scaled(plan.tokens_per_second, "")
        rows.append(
            (
                str(plan.mesh),
                exchange,
                sharding,
                plan.activations,
                "cut (FSDP)" if plan.is_cut else "whole",
                size_text(plan.memory.total),
                seconds,
                speed,
            )
        )
    return table(
        (
            "mesh",
            "exchange",
            "shards",
            "activations",
            "states",
            "a GPU\nholds",
            "a step",
            "tokens/s",
        ),
        rows,
        num_left=5,
    )


def table_of_best(best: MeshPlan) -> str:
    """A table for the best mesh: the memory that a GPU needs, and the time of each part of a step."""
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

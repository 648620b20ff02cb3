"""`rda plan model`: what each rank of a mesh holds, how long training takes, and what would fit."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...forecast.advice import BOUND_BY_COMMUNICATION
from ...forecast.call import MOST_PLANNED, Time
from ...forecast.clock import Hardware, time_text
from ...forecast.large import ERRORS_TEXT
from ...forecast.model import (
    ACTIVATIONS,
    SEARCHED_TO,
    Mesh,
    ModelJob,
    Shape,
    attention_advice,
    attention_of,
    flops_of_step,
    longest_sequence,
    model_memory,
    smallest_mesh,
    step_parts,
)
from ...kernels.traits import TRAITS
from ...models.saved_run import find_checkpoint, read_state
from ...pattern import DilatedPattern
from ...plan.sharding import SHARDINGS
from ...training.options import in_short
from ..hardware import ITEMSIZE, Machine, described, machine_for
from ..hardware import add_options as add_hardware_options
from ..limits import LARGEST
from ..numbers import amount, count, scaled, size_text
from ..output import aligned, progress_bar, wrapped
from .options import add_call, answered, complete, pattern_of

EXAMPLES = """examples:
  rda plan model --layers 24 --embed-dim 2048 --heads 16 --vocab 32K --seq-len 1Mi --mesh 8x8 \\
                 --segment-lengths 2Ki 128Ki --dilation-rates 1 16 --causal --dtype bfloat16 \\
                 --hardware h100-infiniband --tokens 1e11
        memory by part, with activations kept, checkpointed and offloaded; days; what would fit

A model is counted as a LongNetLM of its sizes. With more than 64 ranks to a sequence memory and time of the attention
are estimates (docs/planning.md says how far off they may be).
"""
MOST_PARAMETERS = 10**15  # a thousand times the largest models: more is a slip of the keyboard
# What a config.json calls each field: Llama's and its kin's word, GPT-2's, ours.
_FIELDS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "embed_dim": ("hidden_size", "n_embd", "embed_dim"),
    "ffn_dim": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "segment_lengths": ("segment_lengths",),
    "dilation_rates": ("dilation_rates",),
    "seq_len": ("seq_len",),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_OPTIONAL = ("ffn_dim", "kv_heads", "segment_lengths", "dilation_rates", "seq_len")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--layers", type=count, metavar="L", help="transformer blocks")
    parser.add_argument("--embed-dim", type=count, metavar="E", help="width of the model")
    parser.add_argument("--ffn-dim", type=count, metavar="F", help="of the feed-forward layer (default 4 E)")
    parser.add_argument("--vocab", type=count, metavar="V", help="tokens (default 256, bytes)")
    parser.add_argument("--config", type=Path, metavar="PATH", help="a Hugging Face config.json, or a run's folder")
    add_call(parser, is_required=False)
    parser.add_argument("--sharding", choices=SHARDINGS, default="contiguous", help="who owns which positions")
    parser.add_argument(
        "--mesh", metavar="DxS[xF]", help="data x sequence parallel, states cut over F ranks (FSDP; default 1x--ranks)"
    )
    add_hardware_options(parser)
    parser.add_argument("--tokens", type=amount, metavar="T", help="how long training on so many takes, as 1e11")
    parser.add_argument("--memory", type=count, metavar="BYTES", help="of a rank, as 80G: what fits")


def run(arguments: argparse.Namespace) -> int:
    return answered(lambda: answer(arguments))


def answer(arguments: argparse.Namespace) -> None:
    """Print the plan.

    Raises:
        ValueError: for a model that cannot be.
    """
    if arguments.tokens is not None:
        if arguments.hardware is None and arguments.flops is None:
            raise ValueError("--tokens asks for a time: give --hardware, or --flops and --bandwidth")
        if not 1 <= arguments.tokens <= LARGEST:
            raise ValueError(f"--tokens must be from 1 to {LARGEST:,}, got {arguments.tokens:g}")
    fill_in(arguments)
    complete(arguments)
    question = asked(arguments, pattern_of(arguments), machine_for(arguments))
    found = figures(question)
    print(json.dumps(found, indent=1) if arguments.json else text(question, found))


def fill_in(arguments: argparse.Namespace) -> None:
    """Complete the options with those of a config; what is given by hand wins.

    Raises:
        ValueError: for configs that cannot be read, and what neither says.
    """
    if arguments.config is not None:
        found = read_config(arguments.config)
        for name, value in found.items():
            if getattr(arguments, name) is None or getattr(arguments, name) is False:
                setattr(arguments, name, value)
    for name in ("layers", "embed_dim"):
        if getattr(arguments, name) is None:
            raise ValueError(
                f"--{name.replace('_', '-')} is missing: a model needs --layers and --embed-dim, or --config"
            )
    for name in ("seq_len", "segment_lengths", "dilation_rates"):
        if getattr(arguments, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is missing")


def read_config(path: Path) -> dict[str, Any]:
    """The fields that a plan needs, by our names."""
    file = path
    if path.is_dir() and (path / "config.json").is_file():
        file = path / "config.json"
    elif path.is_dir():
        checkpoint = find_checkpoint(path)
        if checkpoint is None:
            raise ValueError(f"--config {path} has neither a config.json nor a checkpoint of rda train")
        fields = _taken(str(path), read_state(checkpoint)["hyperparameters"] | {"vocab_size": 256})
        return fields | {"causal": True}  # as every model of rda train
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--config {file} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"--config {file} holds no object of fields")
    return _taken(str(file), fields)


def _taken(where: str, fields: dict[str, Any]) -> dict[str, Any]:
    found, missing = {}, []
    for name, keys in _FIELDS.items():
        values = [fields[key] for key in keys if fields.get(key) is not None]
        if values:
            found[name] = values[0]
        elif name not in _OPTIONAL:
            missing.append(" or ".join(keys))
    if missing:
        raise ValueError(f"--config {where} lacks {'; '.join(missing)}: add them, or give --layers, --embed-dim, ...")
    for name, value in found.items():
        is_list, is_branches = isinstance(value, list), name in ("segment_lengths", "dilation_rates")
        if is_list != is_branches:
            raise ValueError(
                f"--config {where}: {name} = {value!r} must be {'a list' if is_branches else 'one number'}"
            )
        entries = value if is_list else [value]
        if not all(isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in entries):
            raise ValueError(f"--config {where}: {name} = {value!r} must be of integers of at least 1")
    _check_kind(where, fields, found)
    return found


def _check_kind(where: str, fields: dict[str, Any], found: dict[str, Any]) -> None:
    """Refuse models whose sizes would be far from a LongNetLM's."""
    experts = next((key for key in _EXPERTS if isinstance(fields.get(key), int) and fields[key] > 1), None)
    if experts is not None:
        raise ValueError(
            f"--config {where}: {experts} = {fields[experts]} is a model of experts, which is not planned: give "
            "--layers, --embed-dim, ... of a model without"
        )
    head_dim, embed_dim, heads = fields.get("head_dim"), found["embed_dim"], found["heads"]
    if head_dim is not None and (not isinstance(head_dim, int) or head_dim * heads != embed_dim):
        raise ValueError(
            f"--config {where}: head_dim = {head_dim!r} over {heads:,} heads is not the width of {embed_dim:,}, which "
            "is not planned: give --layers, --embed-dim, --heads, ... of a model where it is"
        )


def mesh_of(text: str | None, num_ranks: int | None) -> Mesh:
    """Raises ValueError for a mesh that is not one of these ranks."""
    if text is None:
        return Mesh(1, num_ranks or 1)
    try:
        sizes = [count(part) for part in text.lower().split("x")]
    except argparse.ArgumentTypeError:
        sizes = []
    if not 2 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"--mesh {in_short(text)} is not DATAxSEQUENCE or DATAxSEQUENCExSHARDS, as 8x8 or 8x8x64")
    mesh = Mesh(*sizes)
    if num_ranks is not None and mesh.num_ranks != num_ranks:
        raise ValueError(
            f"--mesh {text} has {mesh.data} * {mesh.sequence} = {mesh.num_ranks:,} ranks, and --ranks is {num_ranks:,}"
        )
    if mesh.num_ranks % mesh.shards:
        raise ValueError(
            f"--mesh {text}: {mesh.num_ranks:,} ranks do not divide into groups of {mesh.shards:,} that share the "
            f"states: {mesh.num_ranks:,} mod {mesh.shards:,} = {mesh.num_ranks % mesh.shards:,}"
        )
    return mesh


class Asked(NamedTuple):
    """A model to plan, and what is asked about it."""

    job: ModelJob
    kernel: str
    machine: Machine | None
    tokens: float | None
    memory: int | None


def asked(arguments: argparse.Namespace, pattern: DilatedPattern, machine: Machine | None) -> Asked:
    heads, embed_dim = arguments.heads, arguments.embed_dim
    if embed_dim % heads:
        raise ValueError(f"--embed-dim {embed_dim:,} over --heads {heads} is a head dim of {embed_dim / heads:g}")
    mesh = mesh_of(arguments.mesh, arguments.ranks)
    if mesh.sequence > arguments.seq_len:
        raise ValueError(
            f"--seq-len {arguments.seq_len:,} over {mesh.sequence:,} ranks: "
            f"{mesh.sequence - arguments.seq_len:,} would own nothing. Take fewer."
        )
    kv_heads = arguments.kv_heads
    shape = Shape(
        arguments.layers,
        embed_dim,
        arguments.ffn_dim or 4 * embed_dim,
        arguments.vocab or 256,
        heads,
        kv_heads,
        itemsize=ITEMSIZE[arguments.dtype],
        param_itemsize=max(4, ITEMSIZE[arguments.dtype]),
    )
    for name, value in shape._asdict().items():
        if value < 1:
            raise ValueError(f"{name.replace('_', ' ')} must be at least 1, got {value}")
    if shape.num_parameters > MOST_PARAMETERS:
        raise ValueError(
            f"a model of {shape.num_layers:,} layers of {embed_dim:,} (feed-forward {shape.ffn_dim:,}, vocabulary "
            f"{shape.vocab_size:,}) has more than {MOST_PARAMETERS:.0e} parameters: give smaller sizes"
        )
    job = ModelJob(shape, pattern, arguments.seq_len, arguments.batch, mesh, arguments.sharding)
    memory = arguments.memory or (machine.memory_bytes if machine is not None else None)
    return Asked(job, arguments.kernel, machine, arguments.tokens, memory)


def figures(question: Asked) -> dict[str, Any]:
    job = question.job
    tokens = job.batch * job.mesh.data * job.seq_len
    found: dict[str, Any] = {
        "mesh": job.mesh._asdict(),
        "counted_as": "LongNetLM",
        "pattern": asdict(job.pattern),
        "num_parameters": job.shape.num_parameters,
        "tokens_per_step": tokens,
        "flops_per_step": flops_of_step(job),
        "memory": {},
    }
    with progress_bar(len(ACTIVATIONS) * 3, "step", delay=2) as bar:
        for how in ACTIVATIONS:
            found["memory"][how] = _column(question, how, tokens, bar.update)
    if question.machine is not None:
        found["advice"] = advice_on(job, question.machine.hardware)
    return found


def _column(question: Asked, how: str, tokens: int, step: Callable[[], object]) -> dict[str, Any]:
    """With activations kept, or not. step: called three times."""
    job, traits = question.job, TRAITS[question.kernel]
    memory = model_memory(job, how, traits)
    row: dict[str, Any] = memory._asdict() | {"total": memory.total}
    step()
    if question.machine is not None:
        parts = step_parts(job, how, question.machine.hardware)
        whole = parts.all.seconds
        row["step"] = {
            "matrices": parts.matrices,
            "attention": parts.attention.seconds,
            "gradients": parts.gradients,
            "seconds": whole,
            "is_about": parts.all.is_about,
        }
        row["tokens_per_second"] = tokens / whole
        if question.tokens is not None:
            row["training_seconds"] = question.tokens / tokens * whole
    if question.memory is not None:
        row["fits"] = memory.total <= question.memory
        row["longest_sequence"] = longest_sequence(job, how, traits, question.memory)
        step()
        mesh = smallest_mesh(job, how, traits, question.memory)
        row["smallest_mesh"] = None if mesh is None else mesh._asdict()
        step()
    return row


def advice_on(job: ModelJob, hardware: Hardware) -> list[str]:
    """Where a step is bound by communication, with activations kept, and what would help."""
    parts = step_parts(job, "kept", hardware)
    waits = attention_of(job, hardware=hardware).exposed * parts.attention.seconds
    said = []
    if job.mesh.sequence > 1 and waits >= BOUND_BY_COMMUNICATION * parts.all.seconds:
        said.append(f"attention of one layer: {attention_advice(job, hardware)}")
    share = parts.gradients / parts.all.seconds
    if share >= BOUND_BY_COMMUNICATION:
        said.append(
            f"bound by communication: the sum of gradients takes {share:.0%} of a step; more sequences in a step "
            "(--batch), or a faster link, would help"
        )
    return said


def text(question: Asked, found: dict[str, Any]) -> str:
    job = question.job
    parameters = scaled(found["num_parameters"], "parameters")
    ranks = f"{job.mesh.num_ranks:,} ranks as {job.mesh} (data x sequence{' x shards' * (job.mesh.shards > 1)})"
    each = -(-job.seq_len // job.mesh.sequence)
    lines = [
        wrapped(
            f"counted as a LongNetLM of these sizes (feed-forward of two matrices, a head of its own): {parameters}"
        ),
        wrapped(f"{ranks}; each {each:,} of {job.seq_len:,} positions, batch {job.batch}"),
        wrapped(pattern_line(job.pattern)),
        aligned(("a rank holds", *ACTIVATIONS), _memory_rows(found)),
    ]
    columns = [found["memory"][how] for how in ACTIVATIONS]
    if question.machine is not None:
        lines += ["", wrapped(described(question.machine.hardware, question.machine.source))]
        lines.append(aligned(("a step takes", *ACTIVATIONS), _time_rows(question, columns)))
        lines += map(wrapped, found["advice"])
    if job.mesh.sequence > MOST_PLANNED:
        lines.append(wrapped(ERRORS_TEXT))
    if question.memory is not None:
        rows = [
            ("fits", *("yes" if row["fits"] else "no" for row in columns)),
            (f"longest sequence, to {SEARCHED_TO:.1%}", *(f"{row['longest_sequence']:,}" for row in columns)),
            ("fewest ranks for this length", *(_mesh_text(row["smallest_mesh"]) for row in columns)),
        ]
        lines += ["", aligned((f"in {size_text(question.memory)} a rank", *ACTIVATIONS), rows)]
        if not any(row["fits"] for row in columns):
            lines.append(wrapped(_remedy(question)))
    return "\n".join(lines)


def pattern_line(pattern: DilatedPattern) -> str:
    """Which may stand in a config, where nobody looked."""
    branches = "; ".join(map(str, pattern.branches))
    return f"pattern: {branches}; {'causal' if pattern.is_causal else 'not causal'}"


def _memory_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    names = ("parameters", "gradients", "optimiser", "activations", "working", "total", "host")
    return [(name, *(size_text(found["memory"][how][name]) for how in ACTIVATIONS)) for name in names]


def _time_rows(question: Asked, columns: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    def about(row: dict[str, Any], seconds: float) -> str:
        return Time(seconds, is_about=row["step"]["is_about"]).text

    rows = [
        ("products with weights", *(time_text(row["step"]["matrices"]) for row in columns)),
        ("attention", *(about(row, row["step"]["attention"]) for row in columns)),
        ("sum of gradients", *(time_text(row["step"]["gradients"]) for row in columns)),
        ("in all", *(about(row, row["step"]["seconds"]) for row in columns)),
        ("tokens/s", *(f"{row['tokens_per_second']:,.0f}" for row in columns)),
    ]
    if question.tokens is not None:
        rows.append((f"for {question.tokens:.3g} tokens", *(about(row, row["training_seconds"]) for row in columns)))
    return rows


def _mesh_text(mesh: dict[str, int] | None) -> str:
    return "none" if mesh is None else str(Mesh(**mesh))


def _remedy(question: Asked) -> str:
    """The smallest mesh on which it fits; where none does with the states as they are cut, cut over all ranks."""
    assert question.memory is not None
    job, traits = question.job, TRAITS[question.kernel]
    over_all = job.mesh._replace(shards=job.mesh.num_ranks)
    if over_all.num_ranks == 1:  # one rank has nothing to share: two
        over_all = Mesh(1, 2, 2)
    for mesh in (job.mesh, over_all):
        fitting = []
        for how in ACTIVATIONS:
            smallest = smallest_mesh(replace(job, mesh=mesh), how, traits, question.memory)
            fitting += [] if smallest is None else [(smallest.num_ranks, ACTIVATIONS.index(how), smallest)]
        if fitting:
            _, index, smallest = min(fitting)
            return f"it does not fit; --mesh {smallest} would do, with activations {ACTIVATIONS[index]}"
    return "it does not fit on any number of ranks, not even with the states cut over all: take a smaller model"

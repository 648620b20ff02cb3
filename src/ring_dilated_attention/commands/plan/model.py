"""`rda plan model`: shows what each rank of a mesh would hold, how long training would take, and what would fit."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...forecast import training_cost as forecast
from ...forecast.call_cost import MOST_PLANNED, Time, Way
from ...forecast.clock import Hardware, time_text
from ...forecast.decoders import SIZES, read_decoder
from ...forecast.exchanges import BOUND_BY_COMMUNICATION, advice
from ...forecast.large import ERRORS_TEXT
from ...forecast.shape import Shape
from ...forecast.training_cost import ACTIVATIONS, Mesh, ModelJob
from ...kernels.traits import TRAITS
from ...models.saved_run import find_checkpoint, read_state
from ...pattern import DilatedPattern
from ...plan.sharding import WITHOUT_DOCUMENTS
from ...training.options import in_short
from ..hardware import ITEMSIZE, Machine, add_hardware_options, described, machine_for
from ..numbers import LARGEST, MOST_RANKS, amount, check_at_least, check_given, count, counted, scaled, size_text
from ..output import aligned, progress_bar, wrapped
from .job_options import SUGGEST, add_call, complete, pattern_of

EXAMPLES = f"""examples:
  rda plan model --layers 24 --embed-dim 2048 --heads 16 --vocab 32K \\
                 --seq-len 1Mi --mesh 8x8 --segment-lengths 2Ki 128Ki \\
                 --dilation-rates 1 16 --causal --dtype bfloat16 \\
                 --hardware h100 --gpus-per-host 8 --tokens 1e11
      memory with activations kept, checkpointed or offloaded; days; what fits

A model is counted as a LongNetLM of its sizes, or as its config.json says. If more than {MOST_PLANNED} ranks share a
sequence, memory and time of the attention are estimates (docs/planning.md says how far off they may be).
"""
MOST_PARAMETERS = 10**15  # a thousand times those of the largest models: more is a typing mistake
# The hyperparameters of a run that say what these options say.
_OF_A_RUN = {"layers": "num_layers", "embed_dim": "embed_dim", "heads": "num_heads", "kv_heads": "num_kv_heads"}
_OF_A_RUN |= {name: name for name in ("segment_lengths", "dilation_rates", "seq_len")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layers", type=count, metavar="L", help="transformer blocks")
    add("--embed-dim", type=count, metavar="E", help="width of the model")
    add("--ffn-dim", type=count, metavar="F", help="width of the feed-forward layer (default 4 E)")
    add("--vocab", type=count, metavar="V", help="size of the vocabulary (default 256, bytes)")
    add("--config", type=Path, metavar="PATH", help="a Hugging Face config.json, or a run's folder")
    add_call(parser, with_head_dim=False)
    add("--sharding", choices=WITHOUT_DOCUMENTS, default="contiguous", help="who owns which positions")
    mesh_help = "data x sequence parallel, states cut over F ranks by FSDP (default: 1 x --ranks)"
    add("--mesh", metavar="DxS[xF]", help=mesh_help)
    add_hardware_options(parser)
    add("--tokens", type=amount, metavar="T", help="tokens of the training, such as 1e11: shows its time")
    add("--memory", type=count, metavar="BYTES", help="memory of a rank, such as 80G: shows what fits")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ValueError for a model that is not possible."""
    if arguments.tokens is not None:
        if arguments.hardware is None and arguments.flops is None:
            raise ValueError("--tokens asks for a time: give --hardware, or --flops and --bandwidth")
        if not 1 <= arguments.tokens <= LARGEST:
            raise ValueError(f"--tokens must be from 1 to {LARGEST:,}, got {arguments.tokens:g}")
    fill_in(arguments)
    complete(arguments)
    job = job_of(arguments)
    arguments.ranks = job.mesh.num_ranks  # so that `machine_for` asks for a network if --mesh has several
    machine = machine_for(arguments)
    arguments.memory = arguments.memory or (None if machine is None else machine.memory_bytes)
    found: dict[str, Any] = {
        "mesh": job.mesh._asdict(),
        "counted_as": "LongNetLM" if arguments.model is None else arguments.model[0],
        "pattern": asdict(job.pattern),
        "num_parameters": job.shape.num_parameters,
        "tokens_per_step": job.tokens,
        "flops_per_step": forecast.flops_of_step(job),
    }
    with progress_bar(len(ACTIVATIONS) * 5 + 1, "step", delay=2) as bar:
        found["memory"] = {how: _column(arguments, job, machine, how, bar.update) for how in ACTIVATIONS}
        if machine is not None:
            found["advice"] = advice_on(job, machine.hardware)
        bar.update()
        if not any(row.get("fits", True) for row in found["memory"].values()):
            found["remedy_mesh"], found["remedy"] = _remedy(arguments, job, machine, bar.update)
    print(json.dumps(found, indent=1) if arguments.json else text(arguments, job, machine, found))
    return 0


def fill_in(arguments: argparse.Namespace) -> None:
    """Take from the config what no option gives. Raises ValueError if a size is missing in both."""
    found: dict[str, Any] = {"model": None}
    if arguments.config is not None:
        sizes = {SIZES[name]: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None}
        found |= read_config(arguments.config, sizes)
    for name, value in found.items():
        if getattr(arguments, name, None) in (None, False):
            setattr(arguments, name, value)
    remedy = "" if arguments.layers and arguments.embed_dim else "a model needs --layers and --embed-dim, or --config; "
    check_given(arguments, ("layers", "embed_dim", "seq_len", "segment_lengths", "dilation_rates"), remedy + SUGGEST)


def read_config(path: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """The values in a run's folder or a config.json, by the options' names. A config.json also gives `model`.

    sizes: fields of a config.json that the options give.
    """
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        checkpoint = find_checkpoint(path)
        if checkpoint is None:
            raise ValueError(f"--config {path} has neither a config.json nor a checkpoint of rda train")
        fields = read_state(checkpoint)["hyperparameters"]
        return {option: fields.get(name) for option, name in _OF_A_RUN.items()} | {"causal": True}
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--config {file} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"--config {file} holds no object of fields")
    try:
        model = read_decoder(fields | sizes)
        found: dict[str, Any] = {"model": model, "causal": True} | dict(zip(SIZES, model[1], strict=False))
        if fields.get("dilated_attention") is not None:  # saved by integrations/transformers
            made = DilatedPattern(**fields["dilated_attention"])
            found |= {"segment_lengths": list(made.segment_lengths), "dilation_rates": list(made.dilation_rates)}
            found |= {"phase": made.phase, "split_heads": made.heads == "split"}
    except (ValueError, TypeError) as error:
        raise ValueError(f"--config {file}: {error}") from error
    return found


def mesh_of(text: str | None, num_ranks: int | None) -> Mesh:
    """Raises ValueError if the text is no mesh, or if the mesh does not fit the number of ranks."""
    if text is None:
        return Mesh(1, num_ranks or 1)
    try:
        sizes = [count(size) for size in text.lower().split("x")]
    except argparse.ArgumentTypeError:
        sizes = []
    if not 2 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"--mesh {in_short(text)} is not DATAxSEQUENCE or DATAxSEQUENCExSHARDS, as 8x8 or 8x8x64")
    mesh = Mesh(*sizes)
    ranks, shards = mesh.num_ranks, mesh.shards
    check_at_least("the number of ranks of --mesh", max(ranks, shards), most=MOST_RANKS)
    if num_ranks is not None and ranks != num_ranks:
        product = f"{mesh.data} * {mesh.sequence} = {ranks:,}"
        raise ValueError(f"--mesh {text} has {product} ranks, and --ranks is {num_ranks:,}")
    if ranks % shards:
        undivided = f"{ranks:,} ranks do not divide into groups of {shards:,} that share the states"
        raise ValueError(f"--mesh {text}: {undivided}: {ranks:,} mod {shards:,} = {ranks % shards:,}")
    return mesh


def job_of(arguments: argparse.Namespace) -> ModelJob:
    pattern, heads, embed_dim = pattern_of(arguments), arguments.heads, arguments.embed_dim
    if (arguments.model is None or arguments.model[1].own_head_dim is None) and embed_dim % heads:
        raise ValueError(f"--embed-dim {embed_dim:,} over --heads {heads} is a head dim of {embed_dim / heads:g}")
    mesh = mesh_of(arguments.mesh, arguments.ranks)
    if mesh.sequence > arguments.seq_len:
        idle = f"{mesh.sequence - arguments.seq_len:,} would own nothing"
        raise ValueError(f"--seq-len {arguments.seq_len:,} over {mesh.sequence:,} ranks: {idle}. Take fewer.")
    itemsize = ITEMSIZE[arguments.dtype]
    sizes = (arguments.layers, embed_dim, arguments.ffn_dim or 4 * embed_dim, arguments.vocab or 256)
    shape = Shape(*sizes, heads, arguments.kv_heads) if arguments.model is None else arguments.model[1]
    shape = shape._replace(itemsize=itemsize, param_itemsize=max(4, itemsize))
    if shape.num_parameters > MOST_PARAMETERS:
        width = f"{embed_dim:,} (feed-forward {shape.ffn_dim:,}, vocabulary {shape.vocab_size:,})"
        most = f"more than {MOST_PARAMETERS:.0e} parameters: give smaller sizes"
        raise ValueError(f"a model of {shape.num_layers:,} layers of {width} has {most}")
    return ModelJob(shape, pattern, arguments.seq_len, arguments.batch, mesh, arguments.sharding)


def _column(
    arguments: argparse.Namespace, job: ModelJob, machine: Machine | None, how: str, step: Callable[[], object]
) -> dict[str, Any]:
    """The figures under one of ACTIVATIONS. step: called up to three times."""
    traits = TRAITS[arguments.kernel]
    memory = forecast.model_memory(job, how, traits)
    row: dict[str, Any] = memory._asdict() | {"total": memory.total}
    step()
    if machine is not None:
        times = forecast.step_times(job, how, machine.hardware)
        whole, is_about = times.all
        row["step"] = times._asdict() | {"attention": times.attention.seconds, "seconds": whole, "is_about": is_about}
        row["tokens_per_second"] = job.tokens / whole
        if arguments.tokens is not None:
            row["training_seconds"] = arguments.tokens / job.tokens * whole
    if arguments.memory is not None:
        row["fits"] = memory.total <= arguments.memory
        row["longest_sequence"] = forecast.longest_sequence(job, how, traits, arguments.memory)
        step()
        mesh = _smallest_mesh(arguments, job, machine, how)
        row["smallest_mesh"] = None if mesh is None else mesh._asdict()
        step()
    return row


def _smallest_mesh(arguments: argparse.Namespace, job: ModelJob, machine: Machine | None, how: str) -> Mesh | None:
    hosts = 1 if machine is None else machine.hardware.gpus_per_host or 1
    return forecast.smallest_mesh(job, how, TRAITS[arguments.kernel], arguments.memory, hosts)


def advice_on(job: ModelJob, hardware: Hardware) -> list[str]:
    """If a step with kept activations is bound by communication: where, and what would help."""
    times, said = forecast.step_times(job, "kept", hardware), []
    attention = forecast.attention_of(job, hardware=hardware)
    waits = attention.exposed * times.attention.seconds
    if job.mesh.sequence > 1 and waits >= BOUND_BY_COMMUNICATION * times.all.seconds:
        cut, hardware = job.call.job(job.sharding), forecast.of_a_group(job.mesh.sequence, job.mesh, hardware)
        said.append(f"attention of one layer: {advice(cut, Way(), job.sizes, attention, hardware)}")
    share = times.gradients / times.all.seconds
    if share >= BOUND_BY_COMMUNICATION:
        remedy = "more sequences in a step (--batch), or a faster network, would help"
        said.append(f"bound by communication: the sum of gradients takes {share:.0%} of a step; {remedy}")
    return said


def text(arguments: argparse.Namespace, job: ModelJob, machine: Machine | None, found: dict[str, Any]) -> str:
    columns, dtype = [found["memory"][how] for how in ACTIVATIONS], arguments.dtype
    branches = "; ".join(map(str, job.pattern.branches))
    states = dtype if dtype == "float64" else "float32"
    lines = [
        model_in_words(job.shape, found["counted_as"]),
        f"{counted(job.mesh.num_ranks, 'rank')} as {job.mesh} (data x sequence{' x shards' * (job.mesh.shards > 1)}); "
        f"each {-(-job.seq_len // job.mesh.sequence):,} of {job.seq_len:,} positions, batch {job.batch}",
        f"parameters, gradients and optimiser in {states}, activations in {dtype}",
        # Causality is shown because the config may have set it.
        f"pattern: {branches}; {'causal' if job.pattern.is_causal else 'not causal'}",
    ]
    about = _about(job.mesh)  # "working" and "total" have the memory of the attention
    names = dict.fromkeys(("parameters", "gradients", "optimiser", "activations"), "")
    names |= {"working": about, "total": about, "host": ""}
    held = {name: [before + size_text(row[name]) for row in columns] for name, before in names.items()}
    lines = [*map(wrapped, lines), _table("a rank holds", held)]
    if machine is not None:
        lines += ["", wrapped(described(machine.hardware, machine.source))]
        lines.append(_table("a step takes", _time_rows(columns, arguments.tokens)))
        lines += ["sum of gradients: with the gathers of parameters (FSDP)"] * (job.mesh.shards > 1)
        lines += map(wrapped, found["advice"])
    if arguments.memory is not None:
        fewest = [Mesh(**row["smallest_mesh"]) if row["smallest_mesh"] else None for row in columns]
        longest = [f"{about}{row['longest_sequence']:,}" for row in columns]
        fits = {
            "fits": ["yes" if row["fits"] else "no" for row in columns],
            f"longest sequence, to {forecast.SEARCHED_TO:.1%}": longest,
            "fewest ranks for this length": ["none" if mesh is None else f"{_about(mesh)}{mesh}" for mesh in fewest],
        }
        lines += ["", _table(f"in {size_text(arguments.memory)} a rank", fits)]
    lines += [wrapped(found["remedy"])] if "remedy" in found else []
    named = [found["mesh"], found.get("remedy_mesh"), *(row.get("smallest_mesh") for row in columns)]
    lines += [wrapped(ERRORS_TEXT)] * any(_about(Mesh(**mesh)) for mesh in named if mesh is not None)
    return "\n".join(lines)


def _about(mesh: Mesh) -> str:
    """What stands before figures of this mesh if they are estimates."""
    return "about " * (mesh.sequence > MOST_PLANNED)


def model_in_words(shape: Shape, counted_as: str) -> str:
    """Which model was counted, and its parameters."""
    model = "a LongNetLM of these sizes" if counted_as == "LongNetLM" else f"transformers' {counted_as}"
    matrices = "three" if shape.blocks.ffn == "gated" else "two"
    head = "its embedding is the head" if shape.blocks.is_tied else "a head of its own"
    parameters = scaled(shape.num_parameters, "")
    return f"counted as {model} (feed-forward of {matrices} matrices, {head}): {parameters} parameters"


def _table(title: str, lines: dict[str, list[str]]) -> str:
    """A table with a column for each of ACTIVATIONS. lines: by the name of a row, its cells."""
    return aligned((title, *ACTIVATIONS), [(name, *cells) for name, cells in lines.items()])


def _time_rows(columns: list[dict[str, Any]], tokens: float | None) -> dict[str, list[str]]:
    steps = [row["step"] for row in columns]
    rows = {
        "products with weights": [time_text(step["matrices"]) for step in steps],
        "attention": [Time(step["attention"], step["is_about"]).text for step in steps],
        "sum of gradients": [time_text(step["gradients"]) for step in steps],
        "in all": [Time(step["seconds"], step["is_about"]).text for step in steps],
        "tokens/s": [f"{'about ' * row['step']['is_about']}{row['tokens_per_second']:,.0f}" for row in columns],
    }
    if tokens is not None:
        times = (Time(row["training_seconds"], row["step"]["is_about"]) for row in columns)
        rows[f"for {tokens:.3g} tokens"] = [time.text for time in times]
    return rows


def _remedy(
    arguments: argparse.Namespace, job: ModelJob, machine: Machine | None, step: Callable[[], object]
) -> tuple[dict[str, int] | None, str]:
    """The smallest mesh on which the model fits, with `shards` as it is, or else with states sharded over all ranks;
    and a sentence. step: called up to six times."""
    ranks = job.mesh.num_ranks
    over_all = job.mesh._replace(shards=ranks) if ranks > 1 else Mesh(1, 2, 2)  # one rank cannot shard
    for mesh in (job.mesh, over_all):
        fitting = []
        for i, how in enumerate(ACTIVATIONS):
            if (smallest := _smallest_mesh(arguments, replace(job, mesh=mesh), machine, how)) is not None:
                fitting.append((smallest.num_ranks, i, smallest))
            step()
        if fitting:
            _, index, smallest = min(fitting)
            estimate = ", by an estimate" * (smallest.sequence > MOST_PLANNED)
            would = f"--mesh {smallest} would do{estimate}, with activations {ACTIVATIONS[index]}"
            return smallest._asdict(), f"it does not fit; {would}"
    return None, "it does not fit on any number of ranks, not even with the states cut over all: take a smaller model"

"""Runs the model of `rda embed` on slides, one after another, in one process or in several that share every slide."""

import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...models.longnet_vit import LongNetViT, crowded
from ...models.weights import first_line, load_slide_encoder
from ...ranks.context import ContextParallel
from ...ranks.ranks import ALONE
from ...training.rank_launcher import share_of_cores
from ..local_ranks import Launch, Worker, run_ranks
from ..terminal import is_out_of_memory
from .slides import check_tile_size, read_slide

SECONDS = 20 * 24 * 3600.0  # after so long ranks are ended; multiprocessing counts at most 24 days
RANK_TIMEOUT = timedelta(hours=1)  # of a message: another rank may take long to read a file

Slides = Sequence[tuple[str, Path]]


class Result(NamedTuple):
    """A slide's embedding, an array of numpy (E,) or (depth + 1, E); or the reason why there is none."""

    name: str
    num_tiles: int = 0
    embedding: Any = None
    failure: str = ""
    warning: str = ""  # of an embedding that is probably not what was meant


def embed_all(options: Namespace, slides: Slides, take: Callable[[Result], None]) -> None:
    """Call `take` with each slide's result as it comes. Raises ValueError if weights or device cannot be used."""
    has_gpus = options.device.startswith("cuda")
    if (
        options.ranks > 1
        and has_gpus
        and (options.device != "cuda" or torch.cuda.device_count() < options.ranks)
    ):
        there = f"there are {torch.cuda.device_count()}"
        raise ValueError(
            f"--device {options.device}: {options.ranks} ranks of --device cuda take a GPU each; {there}"
        )
    if options.ranks == 1:
        refusals = [embed_here(options, slides, None, options.device, take)]
    else:
        launch = Launch(
            options.ranks, share_of_cores(options.ranks), has_gpus=has_gpus, seconds=SECONDS
        )
        refusals = run_ranks(
            launch, _embed_rank, options, slides, on_report=lambda rank, result: take(result)
        )
    for refusal in refusals:
        if refusal:
            raise ValueError(refusal)


def _embed_rank(worker: Worker, options: Namespace, slides: Slides) -> str | None:
    device = f"cuda:{worker.rank}" if options.device == "cuda" else options.device
    report = worker.report if worker.rank == 0 else (lambda result: None)
    return embed_here(options, slides, ContextParallel(timeout=RANK_TIMEOUT), device, report)


def embed_here(
    options: Namespace,
    slides: Slides,
    parallel: ContextParallel | None,
    device: str,
    report: Callable[[Result], Any],
) -> str | None:
    """Report each slide's result. Returns why nothing can be embedded, or None."""
    try:
        model = load_slide_encoder(
            options.weights,
            num_heads=options.heads,
            depth=options.depth,
            max_wsi_size=options.max_wsi_size,
            global_pool=options.embedding == "pooled",
            padding=options.padding,
            dtype=torch.float64 if options.dtype == "float64" else torch.float32,
            parallel=parallel,
        )
    except (ValueError, MemoryError, RuntimeError) as error:
        return first_line(error)
    try:
        torch.ones(1, device=device).cpu()
        model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch's
        return f"--device {device} cannot be used: {first_line(error)}"
    # set afterwards: it serves coordinates, and segments stay as they are
    model.tile_size = options.tile_size or 256.0
    for name, path in slides:
        try:
            result = _embed(model, options, name, path, device)
        except (ValueError, MemoryError, RuntimeError) as error:
            if not isinstance(error, ValueError) and (
                parallel is not None or not is_out_of_memory(error)
            ):
                raise  # this rank has left a call half done, and the others cannot go on
            result = Result(name, failure=first_line(error))
        report(result)
    return None


def _embed(model: LongNetViT, options: Namespace, name: str, path: Path, device: str) -> Result:
    """Raises ValueError on all ranks if one of them cannot read the slide, or has a tile that the model refuses."""
    ranks = ALONE if model.parallel is None else model.parallel.ranks

    def rows_of(num_tiles: int) -> slice:
        lengths = ranks.lengths_of(num_tiles)
        start = sum(lengths[: ranks.rank])
        return slice(start, start + lengths[ranks.rank])

    with ranks.refusing():
        slide = read_slide(path, options.keys, rows_of)
        check_tile_size(slide, options.tile_size)
    dtype = getattr(torch, options.dtype)
    autocast = torch.autocast(torch.device(device).type, dtype, enabled=dtype.itemsize == 2)
    with torch.no_grad(), autocast, warnings.catch_warnings():
        # `crowding` says it, of the whole slide
        warnings.filterwarnings("ignore", ".* tiles lie in")
        states = model(
            slide.features[None].to(device),
            slide.coords[None, slide.rows],
            options.layer != "encoder",
        )
    num_tiles, crowding = len(slide.coords), crowded(slide.coords, model.tile_size)
    if options.layer == "all":
        embedding = torch.cat(states)
    else:
        embedding = states[int(options.layer) if options.layer.isdecimal() else -1][0]
    embedding = embedding.to("cpu", torch.promote_types(embedding.dtype, torch.float32))
    if not embedding.isfinite().all():
        failure = f"its features are finite and its embedding is not: too large for {options.dtype}"
        return Result(name, num_tiles, failure=failure)
    return Result(
        name,
        num_tiles,
        embedding.numpy(),
        warning=f"{crowding} Pass --tile-size." if crowding else "",
    )

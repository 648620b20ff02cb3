"""Runs the model of `rda embed` on batches of slides, in one process or in several that share every slide."""

import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.longnet_vit import LongNetViT, crowded
from ...models.weights import first_line, load_slide_encoder
from ...ranks.context import ContextParallel
from ...ranks.ranks import ALONE, Ranks
from ...training.rank_launcher import share_of_cores
from ..local_ranks import Launch, Worker, run_ranks
from ..terminal import is_out_of_memory
from .embeddings import SlideEntry, fingerprint
from .slides import open_slide

SECONDS = 20 * 24 * 3600.0  # after so long ranks are ended; multiprocessing counts at most 24 days
RANK_TIMEOUT = timedelta(hours=1)  # of a message: another rank may take long to read a file

Slides = Sequence[tuple[str, Path]]


class Result(NamedTuple):
    """A slide's embedding as lists of numbers, (E,) or (depth + 1, E); or the reason why there is none."""

    name: str
    entry: SlideEntry | None  # None if the slide could not be read
    embedding: list[Any] | None
    failure: str = ""
    warning: str = ""  # of an embedding that is probably not what was meant


class Tiles(NamedTuple):
    """This process's rows of a slide's features (L, C) and coordinates (L, 2)."""

    name: str
    entry: SlideEntry
    features: Tensor
    coords: Tensor
    warning: str  # of the whole slide


def check_device(device: str, num_ranks: int) -> None:
    """Raise ValueError if `num_ranks` processes cannot compute on the device."""
    try:
        kind = torch.device(device)
        if kind.type == "cuda" and num_ranks > 1:
            if kind.index is not None:
                raise ValueError(f"each of {num_ranks} ranks takes a GPU of its own: pass --device cuda")
            if torch.cuda.device_count() < num_ranks:
                raise ValueError(f"{num_ranks} ranks take a GPU each, and there are {torch.cuda.device_count()}")
        else:
            torch.ones(1, device=device).cpu()
    except (ValueError, RuntimeError, AssertionError) as error:  # the last two are torch's
        raise ValueError(f"--device {device} cannot be used: {first_line(error)}") from error


def embed_all(options: Namespace, slides: Slides, take: Callable[[Result], None]) -> None:
    """Call `take` with each slide's result as it comes. Raises ValueError if the weights cannot be used."""
    if options.ranks == 1:
        refusals = [_embed_here(options, slides, None, options.device, take)]
    else:
        num_threads, has_gpus = share_of_cores(options.ranks), options.device.startswith("cuda")
        launch = Launch(options.ranks, num_threads=num_threads, has_gpus=has_gpus, seconds=SECONDS)
        refusals = run_ranks(launch, _embed_rank, options, slides, on_report=lambda rank, result: take(result))
    if refusal := next(filter(None, refusals), None):
        raise ValueError(refusal)


def _embed_rank(worker: Worker, options: Namespace, slides: Slides) -> str | None:
    device = f"cuda:{worker.rank}" if options.device == "cuda" else options.device
    report = worker.report if worker.rank == 0 else (lambda result: None)
    return _embed_here(options, slides, ContextParallel(timeout=RANK_TIMEOUT), device, report)


def _embed_here(
    options: Namespace, slides: Slides, parallel: ContextParallel | None, device: str, report: Callable[[Result], Any]
) -> str | None:
    """Report each slide's result. Returns why nothing can be embedded, or None."""
    try:
        dtype = torch.float64 if options.dtype == "float64" else torch.float32
        sizes = {"num_heads": options.heads, "depth": options.depth, "max_wsi_size": options.max_wsi_size}
        how: dict[str, Any] = {"global_pool": options.embedding == "pooled", "padding": options.padding, **sizes}
        model = load_slide_encoder(options.weights, **how, dtype=dtype, parallel=parallel)[0].to(device)
    except (ValueError, MemoryError, RuntimeError) as error:  # RuntimeError: torch cannot use the device
        return first_line(error)
    ranks = ALONE if parallel is None else parallel.ranks
    for start in range(0, len(slides), options.batch):
        # Slides of one batch have the same tile size, width of features, and dtype.
        groups: dict[tuple[float, int, torch.dtype], list[Tiles]] = {}
        for name, path in slides[start : start + options.batch]:
            try:
                tiles = _tiles(options, name, path, ranks)
            except ValueError as error:
                report(Result(name, None, None, str(error)))
                continue
            kind = (tiles.entry.tile_size, tiles.features.shape[-1], tiles.features.dtype)
            groups.setdefault(kind, []).append(tiles)
        for group in groups.values():
            for result in _embed(model, options, group, device):
                report(result)
    return None


def _tiles(options: Namespace, name: str, path: Path, ranks: Ranks) -> Tiles:
    """Raises ValueError on all ranks if one of them cannot read the slide."""
    with ranks.refusing():
        found = fingerprint(path, options.keys)  # before the file is opened: a pipe might never open
        with open_slide(path, options.keys) as slide:
            lengths = ranks.lengths_of(slide.num_tiles)
            start, stop = (sum(lengths[:rank]) for rank in (ranks.rank, ranks.rank + 1))
            entry = SlideEntry(found, slide.num_tiles, options.tile_size.of(slide.stated), slide.stated)
            crowding = crowded(slide.coords, entry.tile_size)
            warning = f"{crowding} Pass --tile-size." if crowding else ""
            return Tiles(name, entry, slide.features(start, stop), slide.coords[start:stop], warning)


def _embed(model: LongNetViT, options: Namespace, group: list[Tiles], device: str) -> Iterator[Result]:
    failure = ""
    try:
        embeddings = _forward(model, options, group, device)
    except (ValueError, MemoryError, RuntimeError) as error:
        if not isinstance(error, ValueError) and (model.parallel is not None or not is_out_of_memory(error)):
            raise  # this rank has left a call half done, and the others cannot go on
        failure = first_line(error)
    # This stands after the `except` block, because within it the error still holds the memory of the failed call.
    if failure and len(group) > 1:
        for tiles in group:  # one by one: perhaps only one slide fails
            yield from _embed(model, options, [tiles], device)
    elif failure:
        yield Result(group[0].name, group[0].entry, None, failure)
    else:
        too_large = f"its features are finite and its embedding is not: too large for {options.dtype}"
        for tiles, embedding in zip(group, embeddings, strict=True):
            found = (embedding.tolist(), "", tiles.warning) if embedding.isfinite().all() else (None, too_large)
            yield Result(tiles.name, tiles.entry, *found)


def _forward(model: LongNetViT, options: Namespace, group: list[Tiles], device: str) -> Tensor:
    """(B, E), or (B, depth + 1, E) for all layers."""
    model.tile_size, lengths = group[0].entry.tile_size, None
    features, coords = group[0].features[None], group[0].coords[None]
    if len(group) > 1:
        lengths = [len(tiles.features) for tiles in group]  # with a 0 the batch is refused, then tried one by one
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        features, coords = pad([x.features for x in group]), pad([x.coords.double() for x in group])
    dtype = getattr(torch, options.dtype)
    autocast = torch.autocast(torch.device(device).type, dtype, enabled=dtype.itemsize == 2)
    with torch.no_grad(), autocast, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* tiles lie in")  # `Tiles.warning` says it with the slide's name
        found = model(features.to(device), coords, options.layer != "encoder", lengths=lengths)
    if options.layer == "all":
        return torch.stack(found, dim=1).cpu()
    return (found[int(options.layer)] if options.layer.isdecimal() else found[-1]).cpu()

"""Runs the model of `rda embed` on slides, one after another."""

import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...models.longnet_vit import LongNetViT, crowded
from ...models.weights import first_line, load_slide_encoder
from ..terminal import is_out_of_memory
from .slides import check_tile_size, read_slide


class Result(NamedTuple):
    """A slide's embedding, an array of numpy (E,) or (depth + 1, E); or the reason why there is none."""

    name: str
    num_tiles: int = 0
    embedding: Any = None
    failure: str = ""
    warning: str = ""  # of an embedding that is probably not what was meant


def embed_all(
    options: Namespace, slides: Sequence[tuple[str, Path]], take: Callable[[Result], None]
) -> None:
    """Call `take` with each slide's result as it comes. Raises ValueError if weights or device cannot be used."""
    model = load_slide_encoder(
        options.weights,
        num_heads=options.heads,
        depth=options.depth,
        max_wsi_size=options.max_wsi_size,
        global_pool=options.embedding == "pooled",
        dtype=torch.float32,
    )
    try:
        torch.ones(1, device=options.device).cpu()
        model.to(options.device)
    except (RuntimeError, AssertionError) as error:  # torch's
        raise ValueError(
            f"--device {options.device} cannot be used: {first_line(error)}"
        ) from error
    # set afterwards: it serves coordinates, and segments stay as they are
    model.tile_size = options.tile_size or 256.0
    for name, path in slides:
        try:
            result = _embed(model, options, name, path)
        except (ValueError, MemoryError, RuntimeError) as error:
            if not isinstance(error, ValueError) and not is_out_of_memory(error):
                raise
            result = Result(name, failure=first_line(error))
        take(result)


def _embed(model: LongNetViT, options: Namespace, name: str, path: Path) -> Result:
    """Raises ValueError if the slide cannot be read, or has a tile that the model refuses."""
    slide = read_slide(path)
    check_tile_size(slide, options.tile_size)
    dtype = getattr(torch, options.dtype)
    device = torch.device(options.device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype.itemsize == 2)
    with torch.no_grad(), autocast, warnings.catch_warnings():
        # `crowding` says it, with the name of the slide
        warnings.filterwarnings("ignore", ".* tiles lie in")
        states = model(
            slide.features[None].to(device), slide.coords[None], options.layer != "encoder"
        )
    num_tiles, crowding = len(slide.coords), crowded(slide.coords, model.tile_size)
    if options.layer == "all":
        embedding = torch.cat(states)
    else:
        embedding = states[int(options.layer) if options.layer.isdecimal() else -1][0]
    embedding = embedding.to("cpu", torch.float32)
    if not embedding.isfinite().all():
        failure = f"its features are finite and its embedding is not: too large for {options.dtype}"
        return Result(name, num_tiles, failure=failure)
    return Result(
        name,
        num_tiles,
        embedding.numpy(),
        warning=f"{crowding} Pass --tile-size." if crowding else "",
    )

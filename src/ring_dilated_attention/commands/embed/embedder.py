"""Runs the model of `rda embed` on one slide."""

import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from ...models.longnet_vit import LongNetViT
from ...models.weights import load_slide_encoder
from ...ranks.failures import first_line
from .slides import read_slide


def load(options: Namespace) -> LongNetViT:
    """Load the model onto its device. Raises ValueError if the weights or the device cannot be used."""
    model = load_slide_encoder(
        options.weights,
        max_wsi_size=options.max_wsi_size,
        global_pool=options.embedding == "pooled",
    )
    try:
        torch.ones(1, device=options.device).cpu()
        model.to(options.device)
    except (RuntimeError, AssertionError) as error:  # what torch raises for a bad device
        raise ValueError(
            f"--device {options.device} cannot be used: {first_line(error)}"
        ) from error
    # Set the user's tile size only now: it must change how coordinates are read, but not the segment lengths. The
    # segment lengths were computed when the model was made, from the published tile size 256.
    model.tile_size = options.tile_size or 256.0
    return model


def embed_slide(model: LongNetViT, options: Namespace, path: Path) -> tuple[Any, list[str]]:
    """Embed a slide. Returns the embedding and the texts of the model's warnings. The embedding is a numpy array (E,),
    or (depth + 1, E) with --layer all.

    Raises ValueError if the slide cannot be read, or has a tile that the model refuses.
    """
    features, coords = read_slide(path, options.tile_size)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        states = model(features[None].to(options.device), coords[None], options.layer != "encoder")
    if options.layer == "all":
        embedding = torch.cat(states)
    elif options.layer.isdecimal():
        embedding = states[int(options.layer)][0]
    else:
        embedding = states[-1][0]
    embedding = embedding.cpu()
    if not embedding.isfinite().all():
        raise ValueError(
            "the features are finite, but not the embedding: they are too large for float32"
        )
    return embedding.numpy(), [str(warning.message) for warning in caught]

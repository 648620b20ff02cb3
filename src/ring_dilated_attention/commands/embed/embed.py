"""`rda embed`: computes slide embeddings from files of tile features, with GigaPath's published weights."""

import hashlib
import warnings
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ranks.failures import first_line
from ..arguments import amount, check_installed, positive
from ..console import progress
from ..terminal import is_out_of_memory, say
from .folder import EmbeddingFolder

if TYPE_CHECKING:
    from ...models.longnet_vit import LongNetViT

EXAMPLES = """Slides are HDF5 (.h5), .npz or .pt files, or folders of them. A file has the
features of its tiles (tiles, C) under "features" and their coordinates (tiles,
2) under "coords". --out is a folder: it gets NAME.npy for each slide, and
settings.json, the options that decide what an embedding is. Run the same
command again to go on after Ctrl-C, or with more slides.

--embedding class is the class token (global_pool=False), which GigaPath's
pretraining did not train. --layer last is all_layer_embed=True's last entry.
--layer encoder adds the encoder's LayerNorm (all_layer_embed=False).

examples:
  rda embed slides/ --weights slide_encoder.pth --out embeddings
      as last_layer_embed of GigaPath's pipeline with global_pool=True
  rda embed slides/ --weights slide_encoder.pth --out as_trident \\
      --layer 11 --tile-size 512    as TRIDENT, for tiles 512 pixels apart

Exit codes: 0 done, 1 some slides could not be embedded (they are named, the
folder has the others), 2 refused, 130 interrupted and saved.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "slides",
        nargs="+",
        type=Path,
        metavar="SLIDE",
        help="files of tile features, or folders of them",
    )
    add(
        "--weights",
        type=Path,
        required=True,
        metavar="FILE",
        help="slide_encoder.pth, or safetensors",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write, or to go on with")
    add(
        "--embedding",
        choices=("pooled", "class"),
        default="pooled",
        help="the tiles' mean (default) or the class token",
    )
    add(
        "--layer",
        type=layer,
        default="last",
        metavar="LAYER",
        help="last (default), encoder (last, with the encoder's LayerNorm), all, or k: the state after k layers",
    )
    add(
        "--max-wsi-size",
        type=positive,
        default=262_144,
        metavar="PIXELS",
        help="side of a slide, which sets the segment lengths (default 262144; GigaPath's fine-tuning has 250000)",
    )
    add(
        "--tile-size",
        type=pixels,
        metavar="PIXELS",
        help="step from tile to tile, in the unit of the coordinates (default 256; files that state another are then "
        "refused). Segment lengths do not change with it",
    )
    add("--device", default="cpu", help="cpu (default), cuda or another of torch's")


def layer(text: str) -> str:
    if text not in ("last", "encoder", "all") and not text.isdecimal():
        raise ArgumentTypeError(f"{text} is not last, encoder, all or a number from 0 on")
    return text


def pixels(text: str) -> float:
    size = amount(text)
    if size <= 0:
        raise ArgumentTypeError(f"must be a positive number of pixels, got {size:g}")
    return size


def run(arguments: Namespace) -> int:
    check_installed(["numpy"], "slides")
    from .slides import find_slides

    slides = find_slides(arguments.slides)
    if any(path.suffix in (".h5", ".hdf5") for path in slides.values()):
        check_installed(["h5py"], "slides")
    model = load_model(arguments)
    settings = settings_of(arguments, model)
    folder = EmbeddingFolder(arguments.out, settings)
    new_slides = {}
    model_warnings, failures = [], []
    for name, path in slides.items():
        embedding = folder.path_of(name)
        if not embedding.exists():
            new_slides[name] = path
        elif path.exists() and path.stat().st_mtime > embedding.stat().st_mtime:
            failures.append(
                f"{path}: is newer than {embedding}: remove the older file to embed the slide again"
            )
    num_embedded = 0
    with progress(len(new_slides), "slide") as bar:
        for name, path in new_slides.items():
            try:
                embedding, slide_warnings = embed_slide(model, arguments, path)
                folder.add(name, embedding)
                num_embedded += 1
                model_warnings += [f"warning: {path}: {warning}" for warning in slide_warnings]
            except (ValueError, MemoryError, RuntimeError) as error:
                if not isinstance(error, ValueError) and not is_out_of_memory(error):
                    raise
                failures.append(f"{path}: {first_line(error)}")
            bar.note(name)
            bar.update()
    for message in model_warnings + failures:
        say(f"rda embed: {message}")
    num_there = len(slides) - len(new_slides)
    print(
        f"slides embedded: {num_embedded}; there already: {num_there}; model: {settings['model']}"
    )
    return 1 if failures else 0


def load_model(options: Namespace) -> "LongNetViT":
    """Load the model onto its device. Raises ValueError if the weights or the device cannot be used."""
    import torch

    from ...models.weights import load_slide_encoder

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


def embed_slide(model: "LongNetViT", options: Namespace, path: Path) -> tuple[Any, list[str]]:
    """Embed a slide. Returns the embedding and the texts of the model's warnings. The embedding is a numpy array (E,),
    or (depth + 1, E) with --layer all.

    Raises ValueError if the slide cannot be read, or has a tile that the model refuses.
    """
    import torch

    from .slides import read_slide

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


def settings_of(arguments: Namespace, model: "LongNetViT") -> dict[str, Any]:
    """The settings that decide the values of an embedding. Raises ValueError if the model has no layer with the number
    of --layer."""
    config = model.encoder.config
    depth = config.num_layers
    if arguments.layer.isdecimal() and int(arguments.layer) > depth:
        raise ValueError(
            f"--layer {arguments.layer}: {arguments.weights} has {depth} layers, whose states are 0 to {depth}"
        )
    with arguments.weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "embedding": arguments.embedding,
        "layer": arguments.layer,
        "model": f"{depth} layers x {config.embed_dim}",
        "max_wsi_size": arguments.max_wsi_size,
        "tile_size": model.tile_size,
        "weights_sha256": digest,
    }

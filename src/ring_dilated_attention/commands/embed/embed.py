"""`rda embed`: computes slide embeddings from files of tile features, with GigaPath's weights or similar ones."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from ...training.options import flag
from ..arguments import amount, check_at_least, check_installed, check_writable, count
from ..console import counted, progress, wrapped
from ..terminal import say
from .folder import EmbeddingFolder, digest_of

DTYPES = ("float32", "bfloat16", "float16")
EMBEDDINGS = {
    "pooled": "the mean over the tiles (global_pool=True)",
    "class": "the class token (global_pool=False), which GigaPath's pretraining did not train",
}
LAYERS = {
    "last": "of the last layer's output, then the model's LayerNorm (all_layer_embed=True, its last entry)",
    "encoder": "of the last layer's output, then the encoder's and the model's LayerNorms (all_layer_embed=False)",
    "all": "of what enters the first layer and of every layer's output, then the model's LayerNorm "
    "(all_layer_embed=True)",
}
EXAMPLES = """Slides are HDF5 (.h5), .npz or .pt files, or folders of them. A file has the features of its tiles
(tiles, C) under "features" and their coordinates (tiles, 2) under "coords". --out is a folder: it gets NAME.npy for
each slide, and settings.json, which says which embedding it is. Run the same command again to go on after Ctrl-C, or
with more slides.

examples:
  rda embed slides/ --weights slide_encoder.pth --out embeddings
      as last_layer_embed of GigaPath's pipeline with global_pool=True
  rda embed slides/ --weights slide_encoder.pth --out as_trident \\
      --layer 11 --tile-size 512    as TRIDENT, for tiles 512 pixels apart

Exit codes: 0 done, 1 some slides could not be embedded (they are named, the folder has the others), 2 refused, 130
interrupted and saved.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        choices=EMBEDDINGS,
        default="pooled",
        help="the tiles' mean (default) or the class token",
    )
    layers = "last (default), encoder (last, with the encoder's LayerNorm), all, or k: the state after k layers"
    add("--layer", default="last", metavar="LAYER", help=layers)
    sides = "side of a slide, which sets the segment lengths (default 262144; GigaPath's fine-tuning has 250000)"
    add("--max-wsi-size", type=count, default=262_144, metavar="PIXELS", help=sides)
    steps = "step from tile to tile, in the unit of the coordinates (default 256; files that state another are then "
    steps += "refused). Segment lengths do not change with it"
    add("--tile-size", type=amount, metavar="PIXELS", help=steps)
    add(
        "--heads",
        type=count,
        metavar="H",
        help="attention heads; needed unless the weights are of a published size",
    )
    layers = "layers that the weights must have (default 12 for the published widths, 768 and 384; otherwise any)"
    add("--depth", type=count, metavar="LAYERS", help=layers)
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="16 bits under autocast (default float32)",
    )
    add("--device", default="cpu", help="cpu (default), cuda or another of torch's")
    add(
        "--json",
        action="store_true",
        help="print what became of each slide on stdout, all else on stderr",
    )


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    from .slides import find_slides  # imports torch

    slides = find_slides(arguments.slides)
    if any(path.suffix in (".h5", ".hdf5") for path in slides.values()):
        check_installed(["h5py"], "slides")
    folder = EmbeddingFolder(arguments.out, settings_of(arguments))
    report = embed(arguments, slides, folder)
    for name, failure in report["failures"].items():
        say(f"rda embed: {slides[name]}: {failure}")
    for name, warning in report["warnings"].items():
        say(f"rda embed: warning: {slides[name]}: {warning}")
    summary = f"{counted(len(report['embedded']), 'slide')} embedded"
    if report["already"]:
        summary += f", {len(report['already'])} there already"
    summary += (
        f"; {folder.path}: {folder.settings['embedding']}; weights of {folder.settings['model']}"
    )
    print(wrapped(summary), file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps({"out": str(folder.path), "settings": folder.settings} | report))
    return 1 if report["failures"] else 0


def embed(
    arguments: argparse.Namespace, slides: dict[str, Path], folder: EmbeddingFolder
) -> dict[str, Any]:
    """Add the slides that the folder lacks. Returns, by name, the tiles of those that were embedded, those that were
    there, why others were not embedded, and what is probably wrong with some."""
    from .embedder import Result, embed_all

    todo, already = [], []
    num_tiles, failures, warnings = dict[str, int](), dict[str, str](), dict[str, str]()
    for name, path in slides.items():
        embedding = folder.path_of(name)
        if not embedding.exists():
            todo.append((name, path))
        elif path.exists() and path.stat().st_mtime > embedding.stat().st_mtime:
            failures[name] = f"is newer than {embedding}: remove that file to embed the slide again"
        else:
            already.append(name)
    with progress(len(todo), "slide") as bar:

        def take(result: Result) -> None:
            if result.embedding is None:
                failures[result.name] = result.failure
            else:
                folder.add(result.name, result.embedding)
                num_tiles[result.name] = result.num_tiles
            if result.warning:
                warnings[result.name] = result.warning
            bar.note(f"{result.name}, {result.num_tiles:,} tiles")
            bar.update()

        if todo:
            embed_all(arguments, todo, take)
    return {"embedded": num_tiles, "already": already, "failures": failures, "warnings": warnings}


def check(arguments: argparse.Namespace) -> None:
    """Refuse what can be refused before a file is read."""
    check_installed(["numpy"], "slides")
    if arguments.layer not in LAYERS and not arguments.layer.isdecimal():
        raise ValueError(
            f"--layer {arguments.layer} is none of {', '.join(LAYERS)}, nor a number from 0 on"
        )
    for name in ("heads", "depth", "max_wsi_size"):
        check_at_least(flag(name), getattr(arguments, name))
    if arguments.tile_size is not None and not 0 < arguments.tile_size < math.inf:
        raise ValueError(
            f"--tile-size must be a positive number of pixels, got {arguments.tile_size:g}"
        )
    check_writable("--out", arguments.out)


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """All that decides an embedding's values. Raises ValueError for options that do not fit the weights."""
    from ...models.weights import read_weights, slide_encoder_size

    try:
        digest = digest_of(arguments.weights)
    except ValueError as error:
        raise ValueError(f"--weights {arguments.weights} {error}") from error
    size = slide_encoder_size(
        arguments.weights, read_weights(arguments.weights), arguments.depth, arguments.heads
    )
    layer = arguments.layer
    if layer not in LAYERS and int(layer) > size.depth:
        states = f"{size.depth} layers, whose states are 0 to {size.depth}"
        raise ValueError(f"--layer {layer}: {arguments.weights} has {states}")
    which = LAYERS.get(
        layer, f"of state {layer} of all_layer_embed=True, then the model's LayerNorm"
    )
    return {
        "embedding": f"{EMBEDDINGS[arguments.embedding]} {which}",
        "model": str(size),
        "layer": layer,
        "max_wsi_size": arguments.max_wsi_size,
        "tile_size": arguments.tile_size or 256.0,
        "heads": size.num_heads,
        "dtype": arguments.dtype,
        "weights_sha256": digest,
    }

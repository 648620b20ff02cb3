"""`rda embed`: computes slide embeddings from files of tile features, with GigaPath's weights or similar ones."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ...models.torchscale.architecture import PADDINGS
from ...training.options import flag
from ..local_ranks import RankFailedError
from ..numbers import check_at_least, count, counted
from ..output import check_installed, check_writable, progress_bar, wrapped
from ..terminal import say
from .embeddings import EmbeddingFile, Keys, SlideEntry, TileSizes, digest_of

DTYPES = ("float32", "float64", "bfloat16", "float16")
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
(tiles, C) under "features" and their coordinates (tiles, 2) under "coords". --out is a safetensors file with a tensor
for each slide; its metadata says which embedding it is. Run the same command again to go on after Ctrl-C, or with more
slides.

examples:
  rda embed slides/ --weights slide_encoder.pth --out slides.safetensors
      as last_layer_embed of GigaPath's pipeline with global_pool=True
  rda embed slides/ --weights slide_encoder.pth --out trident.safetensors \\
      --layer 11 --tile-size file                             as TRIDENT
  rda embed huge.h5 --weights slide_encoder.pth --out huge.safetensors --ranks 2
      two processes share one slide

Exit codes: 0 done, 1 a process died or some slides could not be embedded (they are named, the file has the others),
2 refused, 130 interrupted and saved.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("slides", nargs="+", type=Path, metavar="SLIDE", help="files of tile features, or folders of them")
    add("--weights", type=Path, required=True, metavar="FILE", help="slide_encoder.pth, or safetensors")
    add("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write, or to go on with")
    add("--csv", type=Path, metavar="FILE", help="also write --out as a table, a line for each slide (and layer)")
    add("--embedding", choices=EMBEDDINGS, default="pooled", help="the tiles' mean (default) or the class token")
    layers = "last (default), encoder (last, with the encoder's LayerNorm), all, or k: the state after k layers"
    add("--layer", default="last", metavar="LAYER", help=layers)
    padding = "torchscale (default) counts the zero rows that torchscale pads with; exact does not"
    add("--padding", choices=PADDINGS, default="torchscale", help=padding)
    sides = "side of a slide, which sets the segment lengths (default 262144; GigaPath's fine-tuning has 250000)"
    add("--max-wsi-size", type=count, default=262_144, metavar="PIXELS", help=sides)
    steps = "step from tile to tile. PIXELS: for all files. file: as each file states. file:PIXELS: as it states, else "
    steps += "PIXELS. Default: 256; files that state another are refused. Segment lengths do not change with it"
    add("--tile-size", metavar="PIXELS", help=steps)
    add("--heads", type=count, metavar="H", help="attention heads; needed unless the weights are of a published size")
    layers = "layers that the weights must have (default 12 for the published widths, 768 and 384; otherwise any)"
    add("--depth", type=count, metavar="LAYERS", help=layers)
    add("--dtype", choices=DTYPES, default="float32", help="16 bits under autocast (default float32)")
    add("--device", default="cpu", help="cpu (default), cuda or another of torch's")
    add("--batch", type=count, default=1, metavar="N", help="slides, of any sizes, embedded at once (default 1)")
    add("--ranks", type=count, default=1, metavar="P", help="processes that share every slide (default 1)")
    add("--keys", nargs=2, metavar=("FEATURES", "COORDS"), help="names of these two arrays, if not the usual")
    add("--json", action="store_true", help="print what became of each slide on stdout, all else on stderr")


def run(arguments: argparse.Namespace) -> int:
    try:
        return embed_slides(arguments)
    except ValueError as error:
        say(wrapped(f"rda embed: {error}"))
        return 2


def embed_slides(arguments: argparse.Namespace) -> int:
    """The exit code. Raises ValueError for what is refused as a whole."""
    check(arguments)
    from .slides import find_slides  # imports torch

    slides = find_slides(arguments.slides)
    file = EmbeddingFile(arguments.out, settings_of(arguments))
    check_writable("--out", file.place.parent, file.place.name)
    if arguments.csv is not None:
        check_writable("--csv", arguments.csv.parent, arguments.csv.name)
        file.write_table(arguments.csv)
    try:
        num_known, failures, warnings = embed(arguments, slides, file)
    except RankFailedError as error:
        go_on = "What was embedded before is saved: run the same command again to go on."
        say(f"rda embed: the processes failed. {go_on}\n{error}")
        return 1
    for name, failure in failures.items():
        say(wrapped(f"rda embed: {slides[name]}: {failure}"))
    for name, warning in warnings.items():
        say(wrapped(f"rda embed: warning: {slides[name]}: {warning}"))
    before = f", {num_known} {'was' if num_known == 1 else 'were'} there already" if num_known else ""
    out = str(file.path) if file.place.exists() else None  # no file is written if no slide could be embedded
    num_new, num_all = (counted(n, "slide") for n in (len(slides) - len(failures) - num_known, len(file.entries)))
    said = f"{num_new} embedded{before}; {out or 'no file was written'}"
    print(
        wrapped(f"{said}: {file.settings['embedding']}; weights of {file.settings['model']}"),
        *tile_sizes_in_words({name: entry for name, entry in file.entries.items() if name in slides}),
        *([f"{arguments.csv}: a table of {num_all}"] if arguments.csv is not None and out else []),
        sep="\n",
        file=sys.stderr if arguments.json else sys.stdout,
    )
    if arguments.json:
        done = {name: entry._asdict() for name, entry in file.entries.items() if name in slides}
        report = {"out": out, "settings": file.settings, "slides": done, "failures": failures, "warnings": warnings}
        print(json.dumps(report))
    return 1 if failures else 0


def tile_sizes_in_words(entries: dict[str, SlideEntry]) -> list[str]:
    """A line for each pair of a tile size taken and a tile size stated, with the names of its slides."""
    found: dict[str, list[str]] = {}
    for name, (_, _, size, stated) in entries.items():
        said = "as stated" if stated == size else f"and {str(stated or 'none').removesuffix('.0')} is stated"
        found.setdefault(f"tile size {size:g}, {said}", []).append(name)
    listed = {size: f"{', '.join(names[:9])}{', ...' * (len(names) > 9)}" for size, names in found.items()}
    return [wrapped(f"{size}, in {counted(len(found[size]), 'file')}: {names}") for size, names in listed.items()]


def embed(
    arguments: argparse.Namespace, slides: dict[str, Path], file: EmbeddingFile
) -> tuple[int, dict[str, str], dict[str, str]]:
    """Add the slides that the file lacks. Returns how many it held before, and, by name, why others were not added, and
    what is probably wrong with those that were."""
    from .embedder import Result, embed_all

    todo, failures, warnings = [], dict[str, str](), dict[str, str]()
    for name, path in slides.items():
        try:
            if not file.has(name, path, arguments.keys, arguments.tile_size):
                todo.append((name, path))
        except ValueError as error:
            failures[name] = str(error)
    num_known = len(slides) - len(todo) - len(failures)
    try:
        with progress_bar(len(todo), "slide") as bar:

            def take(result: Result) -> None:
                if result.entry is None or result.embedding is None:
                    failures[result.name] = result.failure
                else:
                    file.add(result.name, result.embedding, result.entry)
                    if result.warning:
                        warnings[result.name] = result.warning
                bar.set_postfix_str(f"{result.name}, {result.entry.num_tiles if result.entry else 0:,} tiles")
                bar.update()

            if todo:
                embed_all(arguments, todo, take)
    finally:
        file.write()
        if arguments.csv is not None:
            file.write_table(arguments.csv)
    return num_known, failures, warnings


def check(arguments: argparse.Namespace) -> None:
    """Refuse what can be refused before a file is read, and fill in --keys and --tile-size."""
    if arguments.out.suffix.lower() == ".csv" or arguments.csv == arguments.out:
        raise ValueError(f"--out {arguments.out} would hold safetensors: name it so, and write a table with --csv FILE")
    files = [path for given in arguments.slides for path in (given.iterdir() if given.is_dir() else [given])]
    packages = {".h5": "h5py", ".hdf5": "h5py", ".npz": "numpy"}
    needed = dict.fromkeys(["safetensors", *(packages[x.suffix] for x in files if x.suffix in packages)])
    check_installed(needed, "slides")
    if arguments.layer not in LAYERS and not arguments.layer.isdecimal():
        raise ValueError(f"--layer {arguments.layer} is none of {', '.join(LAYERS)}, nor a number from 0 on")
    for name in ("ranks", "batch", "heads", "depth", "max_wsi_size"):
        check_at_least(flag(name), getattr(arguments, name))
    if arguments.ranks > 1 and arguments.batch > 1:
        both = f"--batch {arguments.batch} with --ranks {arguments.ranks}"
        raise ValueError(f"{both}: ranks share one slide at a time. Leave one out")
    arguments.tile_size = TileSizes.parse(arguments.tile_size)
    arguments.keys = Keys(*((name,) for name in arguments.keys)) if arguments.keys else Keys()


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """All that decides an embedding's values. Raises ValueError for options that do not fit weights or device."""
    from ...models.weights import read_weights, slide_encoder_size
    from .embedder import check_device

    try:
        digest = digest_of(arguments.weights)
    except ValueError as error:
        raise ValueError(f"--weights {arguments.weights} {error}") from error
    check_device(arguments.device, arguments.ranks)
    size = slide_encoder_size(arguments.weights, read_weights(arguments.weights), arguments.depth, arguments.heads)
    layer = arguments.layer
    if layer not in LAYERS:
        if int(layer) > size.depth:
            states = f"{size.depth} layers, whose states are 0 to {size.depth}"
            raise ValueError(f"--layer {layer}: {arguments.weights} has {states}")
        layer = "last" if int(layer) == size.depth else str(int(layer))
    which = LAYERS.get(layer, f"of state {layer} of all_layer_embed=True, then the model's LayerNorm")
    return {
        "embedding": f"{EMBEDDINGS[arguments.embedding]} {which}",
        "model": str(size),
        "layer": layer,
        "padding": arguments.padding,
        "max_wsi_size": arguments.max_wsi_size,
        "tile_size": arguments.tile_size.otherwise or "file",  # of files that state none
        "heads": size.num_heads,
        "dtype": arguments.dtype,
        "weights_sha256": digest,
    }

"""The original code, from checkouts that the user names: torchscale's attention and models, GigaPath's slide encoder.

    TORCHSCALE_CHECKOUT=.../torchscale       a clone of github.com/microsoft/torchscale (read at 4d1e0e8)
    GIGAPATH_CHECKOUT=.../prov-gigapath      a clone of github.com/prov-gigapath/prov-gigapath (read at 09d8e87), which
                                             has a copy of torchscale

It also needs einops. What else it imports is stood in for (fairscale, timm and huggingface_hub, of which nothing is
used here), and flash attention is torch's own op, which runs anywhere and in any dtype.
"""

import importlib
import importlib.util
import os
import sys
from contextlib import AbstractContextManager, redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from benchmarks.peers.adapters import torchscale_attention
from benchmarks.peers.stand_ins import flash
from ring_dilated_attention.pattern import DilatedPattern


def why_not(variable: str) -> str | None:
    """Why the original code cannot run here, or None. `variable` names one of the two checkouts."""
    folder, package = os.environ.get(variable), variable.partition("_")[0].lower()
    if not folder:
        return f"{variable} is not set"
    if not (Path(folder) / package).is_dir():
        return f"{variable}={folder} holds no folder {package!r}"
    if importlib.util.find_spec("einops") is None:
        return "einops is not installed"
    return None


def torchscale(module: str) -> Any:
    """A module of torchscale, from whichever checkout there is."""
    _prepare()
    return importlib.import_module(f"torchscale.{module}")


def attention_module(pattern: DilatedPattern, num_heads: int, head_dim: int) -> Any:
    """torchscale's DilatedAttention without its projections: (B, N, H * D) three times -> (B, N, H * D), None."""
    _prepare()
    return torchscale_attention(pattern, num_heads, head_dim)


def slide_encoder(
    in_chans: int,
    embed_dim: int,
    depth: int,
    *,
    slide_ngrids: int = 1000,
    max_wsi_size: int = 262144,
    **options: Any,
) -> Any:
    """GigaPath's LongNetViT with random weights, without dropout. 16 heads, as all of its sizes have."""
    _prepare()
    module = importlib.import_module("gigapath.slide_encoder")
    sizes = vars(importlib.import_module("torchscale.model.LongNetConfig"))
    shape = {
        "encoder_layers": depth,
        "encoder_embed_dim": embed_dim,
        "encoder_ffn_embed_dim": 4 * embed_dim,
    }
    sizes.setdefault(
        f"LongNet_{depth}_layers_{embed_dim}_dim", sizes["LongNet_12_layers_768_dim"] | shape
    )
    with (
        mock.patch.object(module.LongNetViT, "get_optimal_segment_length", _segment_lengths),
        redirect_stdout(sys.stderr),
    ):
        return module.LongNetViT(
            in_chans=in_chans,
            embed_dim=embed_dim,
            depth=depth,
            slide_ngrids=slide_ngrids,
            max_wsi_size=max_wsi_size,
            norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
            dropout=0.0,
            drop_path_rate=0.0,
            **options,
        )


def activations_in_float64() -> AbstractContextManager[object]:
    """While it lasts, Tensor.float() leaves tensors as they are: torchscale computes its activations in float32, also
    those of a float64 model."""
    return mock.patch.object(torch.Tensor, "float", lambda x: x)


def _segment_lengths(_: object, max_wsi_size: int, tile_size: int) -> str:
    """As the original, which writes numpy 2's integers in a way that it cannot read."""
    numpy: Any = importlib.import_module("numpy")
    steps = numpy.linspace(numpy.log2(1024), int(numpy.log2((max_wsi_size // tile_size) ** 2)), 5)
    return str([int(x) for x in numpy.power(2, steps)])


def _prepare() -> None:
    """Put the checkouts on the path, and stand-ins where they import what they do not use here."""
    folders = {name: os.environ.get(name) for name in ("GIGAPATH_CHECKOUT", "TORCHSCALE_CHECKOUT")}
    gigapath, torchscale_folder = folders.values()
    paths = [str(Path(gigapath) / "gigapath"), gigapath] if gigapath else []
    paths += [torchscale_folder] if torchscale_folder else []
    if not paths:
        raise ValueError(f"no checkout of the original code: set one of {', '.join(folders)}")
    sys.path += [path for path in paths if path not in sys.path]

    def same(x: Any, *_: object, **__: object) -> Any:
        return x

    _stand_in("fairscale.nn", checkpoint_wrapper=same, wrap=same)
    _stand_in("timm.models.layers", drop_path=same)
    _stand_in("timm.models.registry", register_model=same)
    _stand_in("huggingface_hub")
    importlib.import_module("torchscale.component.multihead_attention").flash_attn_func = flash  # type: ignore[attr-defined]


def _stand_in(name: str, **members: Any) -> None:
    """A module of this name and its parents, unless the real one is installed."""
    names = name.split(".")
    if names[0] in sys.modules:
        is_real = sys.modules[names[0]].__spec__ is not None
    else:
        is_real = importlib.util.find_spec(names[0]) is not None
    if is_real:
        return
    for i in range(len(names)):
        sys.modules.setdefault(".".join(names[: i + 1]), ModuleType(".".join(names[: i + 1])))
    vars(sys.modules[name]).update(members)

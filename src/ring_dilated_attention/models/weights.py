"""Reads weights from safetensors files, and from files of torch.save (only with weights_only=True)."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ranks.context import ContextParallel
from ..ranks.failures import first_line
from .longnet_vit import PUBLISHED, LongNetViT
from .names import map_names


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a file of torch.save, by name.

    In a file of torch.save the tensors may be nested, as {"model": tensors} or under "state_dict" or "module".

    Raises:
        ValueError: for a file that is damaged, that holds no tensors by name, or that weights_only=True refuses.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        weights = load_tensors(path)
    except ImportError as error:
        raise ValueError(
            f"{path} needs safetensors: pip install 'ring-dilated-attention[train]'"
        ) from error
    except Exception as error:  # a damaged file may raise any error
        raise ValueError(f"{path} cannot be read as weights: {first_line(error)}") from error
    # Unwrap dicts in which trainers save a model's weights under one of these names.
    for name in ("model", "state_dict", "module"):
        if isinstance(weights, Mapping) and isinstance(weights.get(name), Mapping):
            weights = weights[name]
    tensors = {}
    if isinstance(weights, Mapping):
        tensors = {str(name): x for name, x in weights.items() if isinstance(x, Tensor)}
    if not tensors:
        raise ValueError(f"{path} holds no tensors by name, but a {type(weights).__name__}")
    return tensors


def load_tensors(path: Path, *, is_mapped: bool = False) -> Any:
    """The content of a file of torch.save. is_mapped: map the file into memory, instead of reading all of it.

    Raises ValueError for a pickle that could run code, and for a wrong checksum. A damaged file may raise any error.
    """
    # Map and verify only zip files. Files in torch's older format are not zip files: they cannot be mapped, and have no
    # checksums.
    is_zip = zipfile.is_zipfile(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped and is_zip)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "torch.load(weights_only=True) refuses this file, and nothing else may read it: a pickle can run any code "
            "when it is opened. Save a dict of tensors alone, or weights as safetensors. (Or the file is damaged.)"
        ) from error
    if is_zip:
        with zipfile.ZipFile(path) as file:
            if (damaged := file.testzip()) is not None:  # torch.load verifies no checksum
                raise ValueError(
                    f"the file is damaged: the checksum of its entry {damaged} is wrong"
                )
    return content


def load_slide_encoder(
    path: Path | str,
    *,
    max_wsi_size: int = 262_144,
    tile_size: float = 256,
    global_pool: bool = False,
    padding: str = "torchscale",
    parallel: ContextParallel | None = None,
) -> LongNetViT:
    """Load a slide encoder of a published size from a file of its weights, in float32 and in eval mode.

    Args:
        path: as for `read_weights`.
        max_wsi_size, tile_size: as for `segment_lengths_for`. They cannot be read from the weights.

    Raises:
        ValueError: if some weights are not finite, or if the weights are not those of a published size. (Weights do
            not tell the number of heads, so only published sizes can be loaded.)
    """
    weights = read_weights(path)
    names = {(1, 1, size.embed_dim): name for name, size in PUBLISHED.items()}
    shape = None
    for name, x in weights.items():
        if name.endswith("cls_token"):
            shape = tuple(x.shape)
    if shape not in names:
        shapes = " or ".join(map(str, names))
        raise ValueError(
            f"{path} does not hold a published slide encoder's weights: its cls_token has the shape {shape}, and not "
            f"{shapes}. The number of heads cannot be read from weights: for another size make a LongNetViT "
            "yourself, and load the tensors that read_weights returns"
        )
    model = LongNetViT.published(
        names[shape],
        max_wsi_size=max_wsi_size,
        tile_size=tile_size,
        global_pool=global_pool,
        padding=padding,
        parallel=parallel,
    )
    mapped = map_names(weights, model)
    if mapped.left:
        listed = ", ".join(mapped.left[:5])
        raise ValueError(
            f"{path} holds {len(mapped.left)} tensors that a LongNetViT has no place for: {listed}. If these names "
            "have a prefix, save them without it"
        )
    for name, x in mapped.state_dict.items():
        if name.endswith("_extra_state"):  # skip the bytes that record a pattern
            continue
        if not x.is_floating_point():
            raise ValueError(f"{path}: {name} is {x.dtype}, expected floating numbers")
        if not x.float().isfinite().all():
            raise ValueError(f"{path}: {name} holds NaN or inf as torch.float32")
    try:
        model.load_state_dict(mapped.state_dict)
    except RuntimeError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    return model.eval()

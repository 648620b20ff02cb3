"""Reads weights from safetensors files, and from files of torch.save (only with weights_only=True)."""

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ranks.context import ContextParallel
from .longnet_vit import DILATION_RATES, NUM_HEADS, PUBLISHED, LongNetViT, segment_lengths_for
from .names import map_names

LAYER = re.compile(r"\bencoder\.layers\.(\d+)\.")


class EncoderSize(NamedTuple):
    """The size of a slide encoder. Its weights tell everything but the number of heads."""

    in_chans: int
    embed_dim: int
    depth: int
    ffn_dim: int
    num_heads: int


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a .safetensors file or a file of torch.save. They may be nested, under "model" or the like.

    Raises:
        ValueError: for a file that is damaged, needs more than weights_only=True, or holds no tensors by name.
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
    except Exception as error:  # a damaged file raises anything
        raise ValueError(f"{path} cannot be read as weights: {first_line(error)}") from error
    # under which a trainer's checkpoint keeps the model
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
    """What torch.save wrote. A ValueError refuses unsafe pickles and wrong checksums; damage may raise any error."""
    is_zip = zipfile.is_zipfile(path)  # torch's older format has no checksums, and cannot be mapped
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped and is_zip)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "torch.load(weights_only=True) refuses it, and it is not read otherwise, since a pickle can run any code "
            "when it is opened: save a dict of tensors alone, or weights as safetensors. (Or the file is damaged.)"
        ) from error
    if is_zip:
        with zipfile.ZipFile(path) as file:
            if (damaged := file.testzip()) is not None:  # torch.load does not check it
                raise ValueError(f"it is damaged: the checksum of its {damaged} is wrong")
    return content


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def slide_encoder_size(
    path: Path | str,
    weights: Mapping[str, Tensor],
    depth: int | None,
    num_heads: int | None,
) -> EncoderSize:
    """The size of the slide encoder that a file's weights belong to.

    Args:
        path: for messages.
        depth: the number of layers that the file must have. None means 12 for the widths of the published encoders, 768
            and 384, since a file without its last layers looks complete. For other widths None means any number.
        num_heads: the weights do not tell it. None means 16 for the sizes of the published encoders.

    Raises:
        ValueError: if the weights are not a slide encoder's or of another depth, or their number of heads is not known.
    """
    embed_dim = _size(path, weights, "cls_token", 2)
    in_chans = _size(path, weights, "patch_embed.proj.weight", 1)
    ffn_dim = _size(path, weights, "encoder.layers.0.ffn.fc1.bias", 0)
    numbers = {int(match[1]) for match in map(LAYER.search, weights) if match}
    num_layers = 0  # before the first gap
    while num_layers in numbers:
        num_layers += 1
    asked = "you asked for"
    if depth is None:
        asked = "published encoders of this width have"
        depth = {known.embed_dim: known.depth for known in PUBLISHED.values()}.get(
            embed_dim, num_layers
        )
    if num_layers != depth:
        raise ValueError(
            f"{path} holds {num_layers} layers x {embed_dim}, and {asked} {depth} layers: some are missing, or pass "
            f"depth={num_layers} if it is another model"
        )
    if num_heads is None:
        num_heads = NUM_HEADS
        if ffn_dim != 4 * embed_dim or (in_chans, embed_dim, depth) not in PUBLISHED.values():
            raise ValueError(
                f"{path} holds {depth} layers x {embed_dim} for {in_chans} features of a tile, with feed-forwards of "
                f"{ffn_dim}, which is no published encoder's size, and no weights tell their number of heads: pass "
                "num_heads= (--heads)"
            )
    return EncoderSize(in_chans, embed_dim, depth, ffn_dim, num_heads)


def load_slide_encoder(
    path: Path | str,
    *,
    num_heads: int | None = None,
    depth: int | None = None,
    max_wsi_size: int = 262_144,
    tile_size: float = 256,
    global_pool: bool = False,
    padding: str = "torchscale",
    dtype: torch.dtype | None = None,
    parallel: ContextParallel | None = None,
) -> LongNetViT:
    """Load a LongNetViT from a file of weights, in eval mode.

    Args:
        path: as for `read_weights`.
        num_heads, depth: as for `slide_encoder_size`.
        max_wsi_size, tile_size: as for `segment_lengths_for`; the weights do not tell them either.
        dtype: of the model; by default float32, or float64 if the weights have it.

    Raises:
        ValueError: if the file is not that of a slide encoder, or some of its numbers are not finite.
    """
    weights = read_weights(path)
    size = slide_encoder_size(path, weights, depth, num_heads)
    model = LongNetViT(
        size.in_chans,
        size.embed_dim,
        size.depth,
        size.num_heads,
        mlp_ratio=size.ffn_dim / size.embed_dim,
        tile_size=tile_size,
        segment_lengths=segment_lengths_for(max_wsi_size, tile_size),
        dilation_rates=DILATION_RATES,
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
    is_wide = any(x.dtype == torch.float64 for x in mapped.state_dict.values())
    # loading rounds to the model's dtype
    dtype = dtype or (torch.float64 if is_wide else torch.float32)
    for name, x in mapped.state_dict.items():
        if name.endswith("_extra_state"):  # the bytes of a text
            continue
        if not x.is_floating_point():
            raise ValueError(f"{path}: {name} is {x.dtype}, expected floating numbers")
        if not x.to(dtype).isfinite().all():
            raise ValueError(f"{path}: {name} holds NaN or inf as {dtype}")
    model.to(dtype)
    try:
        model.load_state_dict(mapped.state_dict)
    except RuntimeError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    return model.eval()


def _size(path: Path | str, weights: Mapping[str, Tensor], name: str, dim: int) -> int:
    """Size number `dim` of a tensor that has `dim + 1` sizes. The tensor's name may have any prefix."""
    for key, x in weights.items():
        if key == name or key.endswith(f".{name}"):
            if x.dim() == dim + 1 and x.shape[dim]:
                return x.shape[dim]
            raise ValueError(
                f"{path} does not hold a slide encoder's weights: {name} has shape {tuple(x.shape)}"
            )
    raise ValueError(f"{path} does not hold a slide encoder's weights: it has no {name}")

"""LongNetViT, GigaPath's slide encoder (Xu et al., Nature 2024): from the features of a slide's tiles to one vector.

Shape suffixes: B slides, L tiles of this rank, C features of a tile, N = L + 1 positions with the class token, E
embedding.
"""

import math
import warnings
from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.validate import is_integral
from ..pattern import is_finite_number, is_integer
from ..ranks.context import ContextParallel
from ..ranks.ranks import ALONE, warn_of_forgotten_parallel
from ..ranks.reduce import SumOverRanks
from .documents import why_not_dense
from .torchscale.architecture import TorchscaleConfig
from .torchscale.networks import LongNetEncoder

DILATION_RATES = (1, 2, 4, 8, 16)
NUM_HEADS = 16
# `crowded` does not warn of slides with fewer tiles, because a few tiles may truly lie in few cells.
FEWEST_CROWDED = 16
# With this limit a square slide has at most 2**62 tiles. A pattern requires segments of at most 2**62 positions.
MOST_TILES_OF_A_SIDE = 2**31


class PublishedSize(NamedTuple):
    """The size of a slide encoder whose weights are published: arguments of `LongNetViT`. All published encoders have
    16 heads."""

    in_chans: int
    embed_dim: int
    depth: int


PUBLISHED = {
    "gigapath": PublishedSize(in_chans=1536, embed_dim=768, depth=12),
    "gigapath-flash": PublishedSize(in_chans=384, embed_dim=384, depth=12),
}


def checked_size(name: str, number: Any) -> float:
    """A number as Python's int or float. (Arithmetic with numpy's integers can overflow.)

    Raises ValueError, which quotes `name`, unless the number is positive and finite.
    """
    if not is_finite_number(number) or number <= 0:
        raise ValueError(f"{name}={number!r} must be a number, positive and finite.")
    return int(number) if isinstance(number, Integral) else float(number)


def segment_lengths_for(max_wsi_size: int = 262_144, tile_size: float = 256) -> tuple[int, ...]:
    """GigaPath's five segment lengths. The longest is about the number of tiles of a square slide.

    By default the slide has 1024 x 1024 = 2^20 tiles, and the lengths are 2^10, 2^12.5, 2^15, 2^17.5 and 2^20, rounded
    down. The first exponent is always 10. The last exponent is the base-2 logarithm of the number of tiles, rounded
    down. The exponents are evenly spaced.

    Args:
        max_wsi_size: the side of the slide, in pixels. The original code has the default 262,144, but 250,000 in its
            fine-tuning scripts. The two values give different segment lengths, so the same weights give different
            outputs. The published weights do not say which value they need.
        tile_size: the side of a tile, in pixels. The published weights are used with 256.

    Raises:
        ValueError: for sizes that are not positive and finite, or a slide with no tile or over 2**31 tiles on a side.
    """
    side, tile = checked_size("max_wsi_size", max_wsi_size), checked_size("tile_size", tile_size)
    if side > MOST_TILES_OF_A_SIDE * tile:
        raise ValueError(f"max_wsi_size={side:g} is more than 2**31 tiles of {tile:g} pixels.")
    num_tiles = int(side // tile) ** 2
    if num_tiles < 1:
        raise ValueError(f"max_wsi_size={side:g} is less than one tile of {tile:g} pixels.")
    largest = int(math.log2(num_tiles))
    exponents = [10 + (largest - 10) * i / 4 for i in range(5)]
    return tuple(int(2.0**exponent) for exponent in exponents)


class LongNetViT(nn.Module):
    """GigaPath's slide encoder, with its published parameter names.

        model = LongNetViT.published("gigapath", global_pool=True)
        model.load_state_dict(torch.load("slide_encoder.pth", weights_only=True)["model"])
        embedding = model.eval()(features, coords, all_layer_embed=True)[-1]

    Training differs from the original code in two ways. Gradients are the exact derivative of the forward. And there is
    neither dropout nor stochastic depth: by default the original code has dropout 0.25 and stochastic depth up to 0.1.

    Under `parallel` all ranks return the same embeddings. DDP and FSDP2 average gradients over the ranks. Averaged over
    the ranks, what a backward computes is the gradient of the mean of the ranks' losses.

    Args:
        in_chans: the number of features of a tile.
        slide_ngrids: the number of grid cells along each axis. Coordinates go from 0 to slide_ngrids * tile_size.
        tile_size: the distance from one tile to the next, in the units of the coordinates.
        segment_lengths, dilation_rates: the branches. `segment_lengths_for` returns the published segment lengths.
        global_pool: return the mean of the tiles instead of the class token. (GigaPath's pretraining did not train the
            class token.)
        padding: "torchscale": segments are filled up with rows of zeros, which take part in the softmax, as in the
            library torchscale. The published weights need these rows. "exact": there are no rows of zeros.
        parallel: the ranks that share each slide. Each rank holds a contiguous shard of the slide's tiles, as
            `parallel.shard` cuts it.
        activation_checkpointing: keep only each layer's input and attention output. Backward recomputes other tensors.
    """

    def __init__(
        self,
        in_chans: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        *,
        slide_ngrids: int = 1000,
        tile_size: float = 256,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        global_pool: bool = False,
        padding: str = "torchscale",
        parallel: ContextParallel | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        sizes = {
            "in_chans": in_chans,
            "embed_dim": embed_dim,
            "depth": depth,
            "slide_ngrids": slide_ngrids,
        }
        for name, size in sizes.items():
            if not is_integer(size) or size < 1:
                raise ValueError(f"{name}={size!r} must be a whole number, at least 1.")
        tile_size = checked_size("tile_size", tile_size)
        if parallel is not None and parallel.sharding != "contiguous":
            raise ValueError(
                f"parallel has sharding={parallel.sharding!r}: make the ContextParallel with sharding='contiguous'."
            )
        config = TorchscaleConfig(
            segment_lengths,
            dilation_rates,
            num_layers=depth,
            embed_dim=embed_dim,
            num_heads=num_heads,
            ffn_dim=4 * embed_dim,
            padding=padding,
        )
        if embed_dim % 4:
            raise ValueError(
                f"embed_dim={embed_dim} is not a multiple of 4: sin and cos of x and y take a quarter each."
            )
        self.in_chans = in_chans
        self.slide_ngrids = slide_ngrids
        self.tile_size = tile_size
        self.global_pool = global_pool
        self.parallel = parallel
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        # Use a ModuleDict, so that parameters are named as in published weights (patch_embed.proj.weight and .bias).
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(in_chans, embed_dim)})
        self.encoder = LongNetEncoder(
            config, parallel=parallel, activation_checkpointing=activation_checkpointing
        )
        if padding == "torchscale":
            # Do not record the pattern in the state_dict, because published weights have no such record: their segment
            # lengths are computed from the size of a slide.
            self.encoder.trained_with = None
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.reset_parameters()

    @classmethod
    def published(
        cls,
        name: str,
        *,
        max_wsi_size: int = 262_144,
        tile_size: float = 256,
        global_pool: bool = False,
        padding: str = "torchscale",
        parallel: ContextParallel | None = None,
        activation_checkpointing: bool = False,
    ) -> "LongNetViT":
        """A model of a published size, with random weights: "gigapath" (12 x 768) or "gigapath-flash" (12 x 384).

        `max_wsi_size` and `tile_size` are as for `segment_lengths_for`. Setting model.tile_size afterwards changes the
        grid cells of tiles, but not the segment lengths.
        """
        if not isinstance(name, str) or name not in PUBLISHED:
            raise ValueError(
                f"there is no published size {name!r}; choose one of {tuple(PUBLISHED)}."
            )
        return cls(
            *PUBLISHED[name],
            NUM_HEADS,
            tile_size=tile_size,
            segment_lengths=segment_lengths_for(max_wsi_size, tile_size),
            dilation_rates=DILATION_RATES,
            global_pool=global_pool,
            padding=padding,
            parallel=parallel,
            activation_checkpointing=activation_checkpointing,
        )

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as the original code does.

        Linear maps are drawn by Xavier's rule, and the class token with a standard deviation of 0.02.
        """
        nn.init.normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(self, x: Tensor, coords: Tensor, all_layer_embed: bool = False) -> list[Tensor]:
        """Features of tiles (B, L, C), with coordinates (B, L, 2), to a list of slide embeddings, each (B, E).

        Args:
            x: floating, of any dtype. Under `parallel` these are this rank's tiles.
            coords: x and y of each tile, in pixels. Integers, or floating numbers of at least 32 bits: 16 bits cannot
                represent every pixel. Pass integers under FSDP's `MixedPrecisionPolicy`, which casts floating numbers
                to 16 bits.
            all_layer_embed: by default return one embedding, from the encoder's output after its last LayerNorm. True
                returns depth + 1 embeddings, *without* that LayerNorm: one from the first layer's input, and one from
                each layer's output.

        Raises:
            ValueError: for input that does not fit, on every rank of `parallel`: features of a width other than
                in_chans, no tiles, tiles that are not finite, coordinates outside the grid.
        """
        num_tiles = self._check(x, coords, all_layer_embed)
        if self.parallel is None:
            warn_of_forgotten_parallel(num_tiles)  # `num_tiles` does not count the class token
        # Take an empty slice of the class token on ranks that do not hold position 0, so that the class token has a
        # gradient on these ranks too.
        class_token = self.cls_token.expand(len(x), -1, -1)[:, : self._num_class]
        positions = self._positions(cells_of(coords, self.tile_size))
        tiles_BLE = self.patch_embed["proj"](x.to(self.cls_token.dtype)) + positions
        tokens_BNE = torch.cat((class_token, tiles_BLE), 1)
        pool = partial(self._pool, num_tiles)
        if all_layer_embed:
            # Pool layer by layer, so that the states (B, N, E) of only one layer exist at a time.
            states = self.encoder(tokens_BNE, collect=pool)
        else:
            states = [pool(self.encoder(tokens_BNE))]
        pooled = torch.stack(states)
        if self.parallel is not None:
            pooled = SumOverRanks.apply(pooled, self.parallel.ranks)
        return [self.norm(x_BE) for x_BE in pooled.to(tokens_BNE.dtype).unbind()]

    def _pool(self, num_tiles: int, x_BNE: Tensor) -> Tensor:
        """The mean of all tiles, or the class token, (B, E).

        Under `parallel` each rank returns one summand. The sum over the ranks is the mean or the class token.
        """
        wide = torch.promote_types(x_BNE.dtype, torch.float32)
        if self.global_pool:
            return x_BNE[:, self._num_class :].sum(1, dtype=wide) / num_tiles
        return x_BNE[:, : self._num_class].sum(1, dtype=wide)

    @property
    def _num_class(self) -> int:
        """1 on the rank that holds position 0, which is the class token's position; 0 on other ranks."""
        return int(self.parallel is None or self.parallel.rank == 0)

    def _positions(self, cells: Tensor) -> Tensor:
        """The sine-cosine embeddings (..., E) of grid cells (..., 2), in the weights' dtype. A cell is (x, y).

        The first E / 2 numbers are for y, the last E / 2 for x. Each half has E / 4 sines, then E / 4 cosines. The
        angles for y are y * 10000^(-k / (E / 4)), with k = 0, 1, ...; for x likewise.
        """
        num_frequencies = self.cls_token.shape[-1] // 4
        exponents = (
            torch.arange(num_frequencies, dtype=torch.float64, device="cpu") / num_frequencies
        )
        angles = torch.arange(self.slide_ngrids, device="cpu")[:, None] * 10_000.0**-exponents
        table = torch.cat((angles.sin(), angles.cos()), 1).to(self.cls_token)
        x, y = cells.long().to(table.device).unbind(-1)
        return torch.cat((table[y], table[x]), -1)

    def _check(self, x: Tensor, coords: Tensor, all_layer_embed: bool) -> int:
        """The total number of tiles on all ranks. Raises ValueError on every rank if one rank's input does not fit."""
        failure = why_not_dense(features=x, coords=coords) or self._shape_failure(x, coords)
        if torch.compiler.is_exporting() and failure is None and self.parallel is None:
            # Skip the checks of values, because an exported graph cannot branch on values.
            return x.shape[1]
        ranks = ALONE if self.parallel is None else self.parallel.ranks
        batch, num_own = (0, 0) if failure else x.shape[:2]
        fields: dict[str, object] = {
            "call": "LongNetViT",
            "batch": batch,
            "all_layer_embed": all_layer_embed,
        }
        tile_counts = ranks.handshake(num_own, fields, failure)
        ranks.warn_of_uneven(tile_counts)
        # Prevent attention's warning of uneven shards: rank 0 has the class token besides its tiles.
        ranks.expect_lengths((tile_counts[0] + 1, *tile_counts[1:]))
        if not sum(tile_counts):
            raise ValueError(
                f"no tiles: features have shape {tuple(x.shape)}, and an empty slide has no embedding"
            )
        failure = self._tile_failure(x, coords, sum(tile_counts[: ranks.rank]))
        ranks.handshake(num_own, {"call": "LongNetViT, its tiles"}, failure)
        for slide, coords_L2 in enumerate(coords):
            if crowding := crowded(coords_L2, self.tile_size):
                name = f"slide {slide}: " if batch > 1 else ""
                warnings.warn(f"{name}{crowding} Set model.tile_size.", stacklevel=4)
        return sum(tile_counts)

    def _shape_failure(self, x: Tensor, coords: Tensor) -> str | None:
        """Why the shapes and dtypes of x and coords do not fit, or None if they fit."""
        if x.dim() != 3 or x.shape[-1] != self.in_chans or not x.is_floating_point():
            return (
                f"features have shape {tuple(x.shape)} and dtype {x.dtype}, not floating (batch, tiles, "
                f"in_chans={self.in_chans}); unsqueeze(0) adds a batch dim"
            )
        if not len(x):
            return f"no slides: features have shape {tuple(x.shape)}, a batch of none"
        if coords.shape != (*x.shape[:2], 2):
            return f"coords have shape {tuple(coords.shape)}, these features need {(*x.shape[:2], 2)}: x and y of each"
        if not is_integral(coords) and coords.dtype not in (torch.float32, torch.float64):
            return (
                f"coords have dtype {coords.dtype}, which cannot hold every pixel: pass integers or float32 (FSDP "
                "casts floating ones to 16 bits unless its policy has cast_forward_inputs=False)"
            )
        return None

    def _tile_failure(self, x: Tensor, coords: Tensor, first: int) -> str | None:
        """Why the first bad tile is refused, or None if all tiles fit. This rank's tiles are numbered from `first`."""
        # Cast features as `forward` does: features beyond the range of the weights' dtype become inf.
        dtype = self.cls_token.dtype
        is_finite_BL = x.detach().to(dtype).isfinite().all(-1)
        wrong = (~is_finite_BL).nonzero().tolist()
        if wrong:
            taken = f", taken as {dtype}" if x.dtype != dtype else ""
            return f"features that are not finite: {_tile(wrong, first, len(x))}{taken}"
        cells = cells_of(coords, self.tile_size)
        is_inside_BL = ((cells >= 0) & (cells < self.slide_ngrids)).all(-1)
        wrong = (~is_inside_BL).nonzero().tolist()
        if wrong:
            slide, tile = wrong[0]
            at = tuple(coords[slide, tile].tolist())
            cell = tuple(cells[slide, tile].tolist())
            return (
                f"coordinates outside the grid of {self.slide_ngrids} x {self.slide_ngrids} cells of "
                f"tile_size={self.tile_size:.10g}: {_tile(wrong, first, len(x))} at {at} lies in cell {cell}. "
                "Count coordinates from 0. tile_size is the distance of tiles in the same pixels"
            )
        return None


def cells_of(coords: Tensor, tile_size: float) -> Tensor:
    """The grid cell (x, y) in which each tile lies, (..., 2), float64 on the CPU. Keeps NaN and inf."""
    return (coords.detach().to("cpu", torch.float64) / tile_size).floor()


def crowded(coords_L2: Tensor, tile_size: float) -> str | None:
    """The text of a warning if a slide's tiles lie in so few cells that tile_size seems wrong, else None.

    tile_size seems wrong if the cells that contain tiles have more than two tiles on average.
    """
    x, y = cells_of(coords_L2, tile_size).unbind(-1)
    num_tiles, num_cells = len(coords_L2), len((x * MOST_TILES_OF_A_SIDE + y).unique())
    if num_tiles < FEWEST_CROWDED or num_tiles <= 2 * num_cells:
        return None
    cells = "cell" if num_cells == 1 else "cells"
    return (
        f"{num_tiles:,} tiles lie in {num_cells:,} {cells} of tile_size={tile_size:.10g}, and tiles in one cell get "
        "one position. tile_size (--tile-size) is the distance from one tile to the next, in the units of the "
        "coordinates: 1 if they count tiles."
    )


def _tile(wrong: Sequence[Sequence[int]], first: int, num_slides: int) -> str:
    """The name of the first wrong tile, such as "tile 7 of slide 1 (and 2 more)".

    Args:
        wrong: the slide and the tile of each wrong tile.
        first: the number of this rank's first tile in the whole slide.
        num_slides: the size of the batch. A slide is named only if there are several.
    """
    slide, tile = wrong[0]
    name = f"tile {first + tile}"
    if num_slides > 1:
        name += f" of slide {slide}"
    if len(wrong) > 1:
        name += f" (and {len(wrong) - 1} more)"
    return name

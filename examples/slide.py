"""A small synthetic slide, its embedding, and a picture of how that depends on each tile, with zero rows and without.

    python examples/slide.py                              writes slide.npz and slide.png here
    python examples/slide.py --weights slide_encoder.pth  GigaPath's weights instead of random ones
    rda embed slide.npz --weights ... --out embeddings    the same slide by the command

The tiles' features are made up: a direction for each kind of tissue, and noise.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from ring_dilated_attention.models import LongNetViT, load_slide_encoder

TILE_SIZE = 256
KINDS = ("stroma", "tumour", "necrosis")


def make_slide(num_features: int, columns: int = 60, rows: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features (tiles, C), coordinates (tiles, 2) in pixels, and the kind of tissue (tiles,) of two sections."""
    generator = torch.Generator().manual_seed(0)
    y, x = (z.flatten() for z in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    left = ((x - 0.3 * columns) / (0.24 * columns)) ** 2 + ((y - 0.5 * rows) / (0.42 * rows)) ** 2
    right = ((x - 0.76 * columns) / (0.17 * columns)) ** 2 + ((y - 0.45 * rows) / (0.3 * rows)) ** 2
    is_tissue = (left < 1) | (right < 1)
    kinds = torch.where(right < 0.3, 2, torch.where((left < 0.35) | (right < 0.6), 1, 0))[is_tissue]
    directions = torch.randn(len(KINDS), num_features, generator=generator)
    noise = torch.randn(len(kinds), num_features, generator=generator)
    return directions[kinds] + 0.5 * noise, torch.stack((x, y), 1)[is_tissue] * TILE_SIZE, kinds


def embed(model: LongNetViT, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    """(1, E), as GigaPath's pipeline: of the last layer, without the encoder's last LayerNorm."""
    return model(features[None], coords[None], all_layer_embed=True)[-1]


def sensitivity(model: LongNetViT, features: torch.Tensor, coords: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """(tiles,): how much a change of a tile's features of length 1 can change, up or down, the cosine of the slide's
    embedding and that of its tumour alone. It is the norm of a gradient, and has no direction."""
    is_tumour = kinds == KINDS.index("tumour")
    with torch.no_grad():
        tumour = embed(model, features[is_tumour], coords[is_tumour])
    features = features.clone().requires_grad_()
    embedding = embed(model, features, coords)
    torch.cosine_similarity(embedding, tumour).backward()
    assert features.grad is not None
    return features.grad.norm(dim=1)


def draw(path: Path, coords: torch.Tensor, kinds: torch.Tensor, sensitivities: dict[str, torch.Tensor]) -> None:
    x, y = (coords // TILE_SIZE).T
    figure = Figure(figsize=(13, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = {f"{len(kinds):,} tiles": kinds, **sensitivities}
    most = max(values.max().item() for values in sensitivities.values())  # one scale for all
    for axes, (title, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        image = np.full((int(y.max()) + 1, int(x.max()) + 1), np.nan)
        image[y, x] = values
        if values is kinds:
            shown = axes.imshow(image, cmap=ListedColormap(("#c8b6d8", "#8c4a86", "#d9a441")), vmin=-0.5, vmax=2.5)
            figure.colorbar(shown, ax=axes, ticks=range(len(KINDS)), shrink=0.7).ax.set_yticklabels(KINDS)
        else:
            shown = axes.imshow(image * 1e3, cmap="magma", vmin=0, vmax=most * 1e3)
            bar = figure.colorbar(shown, ax=axes, shrink=0.7)
            bar.set_label("change of the cosine (10⁻³)\nper unit of a tile's features", fontsize=9)
        axes.set_title(title, fontsize=10)
        axes.axis("off")
    figure.savefig(path, dpi=120)


def make_model(weights: Path | None, padding: str) -> LongNetViT:
    if weights is not None:
        return load_slide_encoder(weights, global_pool=True, padding=padding)
    torch.manual_seed(0)
    branches = {"segment_lengths": (64, 256, 1024), "dilation_rates": (1, 2, 4)}
    return LongNetViT(32, 64, 2, 8, **branches, global_pool=True, padding=padding).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="a published slide encoder")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.exit(2, f"examples/slide.py: --folder {arguments.folder} is no folder: make it first\n")
    slide, picture = arguments.folder / "slide.npz", arguments.folder / "slide.png"
    for path in (slide, picture):
        if path.exists():
            parser.exit(2, f"examples/slide.py: {path} is there already: move it away, or choose another --folder\n")
    try:
        models = {padding: make_model(arguments.weights, padding) for padding in ("torchscale", "exact")}
    except ValueError as error:
        parser.exit(2, f"examples/slide.py: --weights: {error}\n")
    features, coords, kinds = make_slide(models["exact"].in_chans)
    np.savez(slide, features=features, coords=coords)
    sensitivities = {
        f"sensitivity to a tile, padding={padding!r}": sensitivity(model, features, coords, kinds)
        for padding, model in models.items()
    }
    draw(picture, coords, kinds, sensitivities)
    with torch.no_grad():
        embedding, exact = (embed(model, features, coords) for model in models.values())
    difference = (embedding - exact).norm() / exact.norm()
    print(f"{len(features):,} tiles, embedding {tuple(embedding.shape)}; zero rows change it by {difference:.1%}")


if __name__ == "__main__":
    main()

"""Fine-tunes a slide encoder: a new head and the encoder's last layer are trained, the rest of the encoder is frozen.

    python examples/finetune_slides.py                        in one process
    torchrun --nproc-per-node 2 examples/finetune_slides.py   two processes share every slide: the same losses
    ... --weights slide_encoder.pth                           GigaPath's weights instead of random ones

The slides are made up: stroma, in two of three classes with a spot of tumour or of necrosis. Put yours in their place.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.models import LongNetViT, load_slide_encoder

CLASSES = ("stroma alone", "tumour", "necrosis")


def make_slides(count: int, in_chans: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Features (1, tiles, C), coordinates (1, tiles, 2) in pixels and class (1,) of each slide."""
    directions = torch.randn(len(CLASSES), in_chans, generator=torch.Generator().manual_seed(0))
    generator, slides = torch.Generator().manual_seed(seed), []
    for i in range(count):
        label, num_tiles = i % len(CLASSES), int(torch.randint(150, 250, (), generator=generator))
        coords = torch.stack((torch.arange(num_tiles) % 15, torch.arange(num_tiles) // 15), 1)
        spot = torch.rand(2, generator=generator) * 8 + 1
        kinds = torch.where((coords - spot).norm(dim=1) < 2, label, 0)
        features = directions[kinds] + torch.randn(num_tiles, in_chans, generator=generator)
        slides.append((features[None], coords[None] * 256, torch.tensor([label])))
    return slides


class SlideClassifier(nn.Module):
    def __init__(self, encoder: LongNetViT) -> None:
        super().__init__()
        self.encoder, self.parallel = encoder.requires_grad_(False), encoder.parallel
        self.encoder.encoder.layers[-1].requires_grad_(True)
        self.head = nn.Linear(encoder.cls_token.shape[-1], len(CLASSES))

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        """A whole slide, the same on every rank, to (1, classes), the same on every rank."""
        own = self.parallel.shard_batch({"features": features, "coords": coords})  # refuses two slides for one
        return self.head(self.encoder(own["features"], own["coords"], all_layer_embed=True)[-1])


def finetune(classifier: SlideClassifier, num_epochs: int, num_slides: int = 48) -> Iterator[tuple[float, float]]:
    """Yields the loss and the accuracy on held-out slides, before the training and after each epoch."""
    slides, held_out = (make_slides(num_slides, classifier.encoder.in_chans, seed) for seed in (1, 2))
    model = nn.parallel.DistributedDataParallel(classifier) if dist.is_initialized() else classifier
    last = classifier.encoder.encoder.layers[-1].parameters()
    optimizer = torch.optim.AdamW([{"params": classifier.head.parameters(), "lr": 3e-3}, {"params": last, "lr": 1e-3}])
    for epoch in range(num_epochs + 1):
        for features, coords, label in slides if epoch else ():
            loss = nn.functional.cross_entropy(model(features, coords), label)
            loss.backward()  # DDP takes the mean of the ranks' gradients, which is the gradient of one process
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # every rank makes every forward
            logits = torch.cat([model(features, coords) for features, coords, _ in held_out])
        labels = torch.cat([label for _, _, label in held_out])
        yield nn.functional.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()


def make_classifier(parallel: ContextParallel, weights: Path | None = None) -> SlideClassifier:
    torch.manual_seed(0)  # the same random parameters on every rank
    if weights is not None:
        return SlideClassifier(load_slide_encoder(weights, global_pool=True, parallel=parallel))
    branches = {"segment_lengths": (64, 256), "dilation_rates": (1, 2)}
    return SlideClassifier(LongNetViT(32, 64, 2, 8, **branches, global_pool=True, parallel=parallel))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="a published slide encoder")
    parser.add_argument("--slides", type=int, default=48, help="to train on, and as many to test (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="times that each slide is seen (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("finetuned.safetensors"), help="for what was trained")
    arguments = parser.parse_args(argv)
    if arguments.out.exists():
        parser.exit(2, f"examples/finetune_slides.py: {arguments.out} is there already: choose another --out\n")
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    classifier = make_classifier(ContextParallel(), arguments.weights)
    for epoch, (loss, accuracy) in enumerate(finetune(classifier, arguments.epochs, arguments.slides)):
        if classifier.parallel.rank == 0:
            print(f"{epoch} epochs: held-out loss {loss:.4f}, accuracy {accuracy:.0%}")
    if classifier.parallel.rank == 0:
        save_file({name: x.detach() for name, x in classifier.named_parameters() if x.requires_grad}, arguments.out)
        print(f"{arguments.out}: the head and the encoder's last layer")
    classifier.parallel.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

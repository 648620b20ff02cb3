"""The sizes and patterns that are run on the card, and tiny ones (QUICK) to try the same code on a CPU."""

from typing import NamedTuple

import torch

from ..measure import Sizes

PAPER = ((2048, 4096, 8192, 16_384, 32_768), (1, 2, 4, 6, 12))
TWO = ((2048, 4096), (1, 2))


class Tile(NamedTuple):
    """The sizes of one call of torch's attention op: a batch of segments, each of `rows` queries and keys.

    rate: the rows of a head are so many positions apart in memory. If that is more than 1, each head begins one
    position after the head before it.
    """

    segments: int
    rows: int
    head_dim: int
    rate: int = 1


class Settings(NamedTuple):
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 12
    head_dims: tuple[int, ...] = (64, 128)
    branches: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (TWO, PAPER)
    # (length, repeats). Dense attention is too slow beyond `dense_at_most`. There its time is scaled from that length,
    # in proportion to the FLOPs.
    lengths: tuple[tuple[int, int], ...] = ((32_768, 10), (131_072, 3), (1_048_576, 3))
    dense_at_most: int = 131_072
    # The paper's calls have tiles of 2,048 rows, at rates 1 to 4, and of 2,730 and 2,731 rows, at rates 6 and 12.
    tiles: tuple[Tile, ...] = (Tile(64, 2048, 64), Tile(16, 2730, 64, 12), Tile(64, 2048, 128))
    memory: Sizes = Sizes(524_288, 12, 64, torch.float16)
    memory_bytes: float = 8e9
    # query, key, value, out and each gradient have more than 2**31 elements
    beyond: Sizes = Sizes(1_050_624, 16, 128, torch.float16)
    small_lengths: tuple[int, ...] = (1024, 4096, 16_384, 32_768)
    model_length: int = 2**20
    model_width: int = 768
    model_layers: int = 12
    ceiling_rows: int = 8192
    # Arguments of pytest. Tests that need no card are left out: `make test` runs them.
    tests: tuple[str, ...] = (
        "tests/kernels/test_cuda.py",
        "tests/kernels/test_row_kernels.py",
        "tests/kernels/test_sdpa.py",
        "--deselect=tests/kernels/test_row_kernels.py::test_in_the_interpreter",
        "--deselect=tests/kernels/test_row_kernels.py::test_compiled_for_gpus",
    )
    tests_of_ranks: tuple[str, ...] = ("tests/ranks/test_host_memory.py",)

    @property
    def is_quick(self) -> bool:
        return self.device == "cpu"


QUICK = Settings(
    device="cpu",
    num_heads=2,
    head_dims=(16,),
    branches=(((128, 256), (1, 2)),),
    lengths=((512, 1), (1024, 1)),
    dense_at_most=512,
    tiles=(Tile(2, 128, 16), Tile(2, 85, 16, 3)),
    memory=Sizes(2048, 4, 16, torch.float16),
    memory_bytes=8e6,
    beyond=Sizes(1280, 2, 16, torch.float16),
    small_lengths=(256,),
    model_length=512,
    model_width=32,
    model_layers=2,
    ceiling_rows=128,
)

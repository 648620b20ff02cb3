"""Reads checkpoints of which each rank wrote a part, on any number of ranks: safetensors, never a pickle.

torch.distributed.checkpoint finds the parts that this rank needs. Ranks send no messages to read a checkpoint.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load


def read_shards(checkpoint: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors with the names, dtypes and shapes of `like`; of a DTensor, this rank's part.

    Raises ValueError if the checkpoint lacks a tensor of `like`, has it in another shape, or cannot be read.
    """
    found = {name: torch.empty_like(x, requires_grad=False) for name, x in like.items()}
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        reader.read_metadata()  # `load` would log a traceback of its errors
    except Exception as error:  # a damaged header may raise any error
        raise ValueError(f"{checkpoint} cannot be read: {type(error).__name__}: {error}") from error
    try:
        with warnings.catch_warnings():
            # the warning says what no_dist=True asks for
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(dict(found), storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise ValueError(
            f"{checkpoint} cannot be read: {next(iter(error.failures.values()))[0]}"
        ) from error
    return found

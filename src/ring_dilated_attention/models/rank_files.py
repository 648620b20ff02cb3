"""Reads checkpoints of which each rank wrote its part, at any number of ranks: safetensors, never a pickle.

torch.distributed.checkpoint finds the parts that this rank wants. Ranks send no messages for it.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load


def read_shards(checkpoint: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of these names, dtypes and shapes; of a DTensor, the part of this rank. A ValueError if they do not
    fit."""
    found = {name: torch.empty_like(x, requires_grad=False) for name, x in like.items()}
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        reader.read_metadata()  # `load` logs a traceback if it fails there
    except Exception as error:  # a head that does not fit its tensors raises anything
        raise ValueError(f"{checkpoint} cannot be read: {type(error).__name__}: {error}") from error
    try:
        with warnings.catch_warnings():
            # that is what no_dist asks for
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(dict(found), storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise ValueError(
            f"{checkpoint} cannot be read: {next(iter(error.failures.values()))[0]}"
        ) from error
    return found

"""Reads checkpoints of safetensors files: one file, or one file from each rank. Never reads a pickle.

Any number of ranks can read such a checkpoint. torch.distributed.checkpoint finds the parts that a rank needs, without
messages between ranks.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load


def read_shards(checkpoint: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read from a checkpoint the tensors that `like` names, in the dtypes and shapes of `like`.

    For a DTensor in `like` only this rank's part is read. Raises ValueError if the checkpoint lacks a tensor, has it in
    another shape, or cannot be read.
    """
    tensors = {name: torch.empty_like(x, requires_grad=False) for name, x in like.items()}
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        reader.read_metadata()  # find errors before `load`, which would also log a traceback
    except Exception as error:  # a damaged header may raise any error
        raise ValueError(f"{checkpoint} cannot be read: {type(error).__name__}: {error}") from error
    try:
        with warnings.catch_warnings():
            # Ignore torch's warning that `load` is not distributed: no_dist=True asks for such a `load`.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(dict(tensors), storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise ValueError(
            f"{checkpoint} cannot be read: {next(iter(error.failures.values()))[0]}"
        ) from error
    return tensors

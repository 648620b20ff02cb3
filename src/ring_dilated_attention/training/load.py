"""A run's folder as a model."""

from pathlib import Path

from ..models.longnet import LongNetLM
from .checkpoint import MODEL_FILE, check_whole, find_checkpoint
from .options import Hyperparameters


def load_model(folder: Path) -> LongNetLM:
    """The model of a run, with the parameters of its newest checkpoint.

    Raises:
        ValueError: if there is none, or it is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        raise ValueError(f"{folder}: there is no checkpoint in this folder; pass the folder of a run of rda train")
    try:
        state = check_whole(checkpoint)
        model = LongNetLM(Hyperparameters.from_dict(state["hyperparameters"]).model_config())
        model.load_state_dict(load_file(checkpoint / MODEL_FILE), strict=True)
    except (KeyError, OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"{checkpoint} cannot be loaded: {error}") from error
    return model

"""Memory of training a model of 100 layers, by part: activations kept, checkpointed, or offloaded to the host.

It is measured as in `model_memory`, beside what `rda plan model` says of it.
"""

from dataclasses import replace

from ring_dilated_attention.forecast.training_cost import ACTIVATIONS
from ring_dilated_attention.training.options import Hyperparameters

from .model_memory import Settings, num_steps, run, table

__all__ = ["FULL", "QUICK", "SUMMARY", "num_steps", "run", "table"]

SUMMARY = "memory of training 100 layers: activations kept, checkpointed, offloaded"
_SHORT = Hyperparameters(seq_len=2048, segment_lengths=(256, 2048), dilation_rates=(1, 8), optimizer="adamw")
FULL = Settings(replace(_SHORT, num_layers=100, embed_dim=64), (1, 2), ACTIVATIONS)
QUICK = Settings(replace(_SHORT, num_layers=8, embed_dim=32), (1,), ("offloaded",))

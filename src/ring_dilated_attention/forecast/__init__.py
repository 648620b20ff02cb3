"""Predicts the FLOPs, messages, memory and time of an attention call or of a training, without running it."""

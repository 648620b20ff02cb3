"""Carries out a plan on tensors."""

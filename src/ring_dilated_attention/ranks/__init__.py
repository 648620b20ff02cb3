"""Connects processes, and makes them agree on a call before it runs."""

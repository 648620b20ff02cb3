"""A benchmark of one GPU in nine minutes: are the results right, and how much time and memory do calls take?

- `command` has the parts in their order, each with its limit in seconds.
- `right` has those that check results, and `speed` those that measure time and memory.
- `settings` has their sizes.

The record is runs/gpu.json, or in the folder of `--results`. It is written anew after each part.
"""

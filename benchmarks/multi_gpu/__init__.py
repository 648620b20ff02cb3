"""A benchmark of several GPUs: NCCL, the network between cards, overlap, and a rank that fails.

Each part runs in processes of its own, one for each GPU, and has its own limit of seconds. So a part that hangs or
crashes does not stop the others. All limits together are less than ten minutes. The record is written after each part.

No machine with several GPUs has run this yet. `--quick` runs the same code on two CPU ranks over gloo.
"""

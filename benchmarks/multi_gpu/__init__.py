"""What only several GPUs can show: NCCL, the network between cards, overlap, and a rank that fails.

Each part runs in processes of its own, one for each GPU, and has its own limit of seconds: what hangs or crashes costs
that part alone. All limits together are less than ten minutes. The record is written whenever a part ends. No machine
with several GPUs has run this yet: `--quick` rehearses it on two CPU ranks over gloo.
"""

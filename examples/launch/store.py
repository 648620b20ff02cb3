"""Where the torchruns of several hosts meet, in a process of its own.

    python examples/launch/store.py 29400

Whichever torchrun ends, the store stays. Start it on a host that stays too.
"""

import signal
import sys

import torch.distributed as dist

store = dist.TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
signal.pause()

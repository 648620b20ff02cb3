"""For the server that ranks are forked from, which imports this last: what it has imported lives as long as it does, so
that no rank need look for garbage there, and copy the pages where it looks."""

import ctypes
import gc
import sys

HUGE, MADV_COLLAPSE = 2**21, 25  # of linux/mman.h


def collapse():
    """Let this memory lie in huge pages, where Linux can do so when asked (from 6.1 on). A fork copies the table of all
    pages, and with it a rank's start takes half the time."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as file:
        for line in file.readlines():
            addresses, access, _, _, inode, *_ = line.split()
            if access == "rw-p" and inode == "0":
                start, stop = (int(x, 16) for x in addresses.split("-"))
                for page in range(-(-start // HUGE) * HUGE, stop // HUGE * HUGE, HUGE):
                    madvise(page, HUGE, MADV_COLLAPSE)


if sys.platform == "linux":
    collapse()
gc.freeze()
gc.enable()

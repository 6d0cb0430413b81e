"""How the C library of a process of our own treats freed memory."""

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of glibc's `mallopt`
KEPT_BYTES = 256 * 2**20  # of freed memory at the end of the heap
LARGE_BYTES = 64 * 2**20  # blocks of this size and larger are returned to the system at once


def keep_freed_memory() -> None:
    """Keep freed memory for what is allocated next. Vectors of a few megabytes come and go with every client, and by
    default glibc returns them to the system, which clears every page before it is used again.

    Only for a process that is ours: a worker, or the program. The environment of the user goes first.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    mallopt(TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(MMAP_THRESHOLD, LARGE_BYTES)

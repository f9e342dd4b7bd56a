"""Memory of one request, kept for the next."""

from __future__ import annotations

import ctypes
import platform

# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_BLOCK = 32 * 2**20
_MOST_KEPT = 256 * 2**20


def keep_freed_memory() -> None:
    """Keep what frames and images took instead of handing it back to the system; until the process ends.

    A request takes some 30 MB in blocks of megabytes. By default glibc returns them as soon as they are free,
    and touching fresh pages again costs more time than copying the pixels. Up to 256 MiB at the end of each
    of its heaps are kept instead. Without glibc nothing is done.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
    libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)

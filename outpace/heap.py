"""Returns freed memory to the system. Imports no torch, so that every process can use it."""

import ctypes
import sys
from contextlib import suppress


def give_memory_back() -> None:
    """Return free memory to the system: otherwise glibc keeps gigabytes for threads that once needed them."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)

"""Memory that this process does not use any more, given back to the system. No torch: every process may do this."""

import ctypes
import sys
from contextlib import suppress


def give_memory_back() -> None:
    """Return what is free to the system: glibc keeps gigabytes for threads that once needed them."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)

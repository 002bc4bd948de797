"""Chooses which of NVIDIA's libraries multiplies matrices while a step is captured."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

LT_ROWS = range(25, 240)
"""Rows with which a step of the 8B takes 2 to 6 % less time with cuBLASLt than with cuBLAS on an H200 (docs/log.md)."""
SWITCHING = threading.Lock()
"""Held while standard error is redirected: otherwise two threads would save and restore what the other one set."""


@contextmanager
def gemm_library(rows: int) -> Iterator[None]:
    """Have torch multiply with the library that is faster for this number of rows.

    torch has one choice for the whole process, so use this only around a capture: a graph keeps the kernels that were
    chosen.
    """
    if rows not in LT_ROWS or torch.version.cuda is None:
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    _prefer("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _prefer(library: str) -> None:
    """Choose a library without torch's C++ warning that the choice is experimental.

    The warning is written to file descriptor 2, past Python's `warnings` and `sys.stderr`, and torch has no switch for
    it. So the descriptor points to /dev/null for the time of this one call, which computes nothing. What other threads
    write to standard error meanwhile is lost. A daemon may have closed the descriptor; then nothing is redirected.
    """
    with SWITCHING, ExitStack() as stack:
        with suppress(OSError):
            kept = os.dup(2)
            stack.callback(os.close, kept)
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            stack.callback(os.dup2, kept, 2)
        torch.backends.cuda.preferred_blas_library(library)

"""Which of NVIDIA's libraries multiplies matrices while a step is captured."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LT_ROWS = range(25, 240)
"""Rows at which a step of the 8B takes 2 to 6 % less with cuBLASLt than with cuBLAS on an H200 (docs/log.md)."""


@contextmanager
def gemm_library(rows: int) -> Iterator[None]:
    """Have torch multiply with the library that is faster for so many rows.

    torch knows one choice for the whole process, so this is for the time of a capture: a graph keeps the kernels that
    were chosen.
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
    """torch writes to standard error, past Python, that this is experimental; once, and nobody can do anything."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        torch.backends.cuda.preferred_blas_library(library)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)

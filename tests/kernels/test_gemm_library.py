"""The library is another one for some rows, and for no longer than it is asked for."""

import os

import pytest
import torch

from outpace.kernels.gemm_library import LT_ROWS, _prefer, gemm_library
from tests.kernels.tolerances import on_gpu


@on_gpu
def test_few_rows_are_multiplied_by_cublaslt_while_asked(capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.backends.cuda.preferred_blas_library()
    with gemm_library(LT_ROWS[0]):
        assert "lt" in str(torch.backends.cuda.preferred_blas_library()).lower()
    assert torch.backends.cuda.preferred_blas_library() == before
    assert capfd.readouterr().err == ""


@on_gpu
def test_the_choice_is_taken_back_when_a_capture_fails() -> None:
    before = torch.backends.cuda.preferred_blas_library()
    with pytest.raises(ZeroDivisionError), gemm_library(LT_ROWS[0]):
        raise ZeroDivisionError
    assert torch.backends.cuda.preferred_blas_library() == before


def test_other_rows_change_nothing() -> None:
    before = torch.backends.cuda.preferred_blas_library()
    with gemm_library(LT_ROWS[-1] + 1):
        assert torch.backends.cuda.preferred_blas_library() == before


def test_warnings_of_the_choice_are_hidden_and_a_closed_standard_error_is_no_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []

    def choose(library: str) -> None:
        os.write(2, b"a warning")
        chosen.append(library)

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", choose)
    _prefer("cublaslt")
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"

    def closed(fd: int) -> int:
        raise OSError(f"{fd} is closed")

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", closed)
        _prefer("cublas")
    assert chosen == ["cublaslt", "cublas"]

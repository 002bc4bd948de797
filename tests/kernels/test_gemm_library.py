"""The library is another one for some rows, and for no longer than it is asked for."""

import pytest
import torch

from outpace.kernels.gemm_library import LT_ROWS, gemm_library
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

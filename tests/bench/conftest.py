"""Benchmarks of kernels run in Triton's interpreter without a GPU: which tests run beside them does not matter."""

from tests.kernels import conftest as conftest

"""Kernel tests run on the GPU where there is one, and in Triton's interpreter on the CPU elsewhere."""

import logging
import os
import secrets
import sys
from typing import Any

import numpy as np
import pytest
import torch


def _interpret_what_is_loaded() -> None:
    """Sends to the interpreter what was defined before this file was read: Triton's own library, early kernels."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in [m for name, m in sys.modules.items() if name.startswith(("triton.language", "outpace.kernels"))]:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))


def _round_to_bfloat16() -> None:
    """Makes the interpreter round to bf16 as GPUs do, to the nearest even.

    It cuts the low bits of fp32 off, and takes integers and fp8 for bits of bf16.
    """
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar != bfloat16 or src.dtype.scalar == bfloat16:
            return cast(self, src, dst_type)
        if src.dtype.scalar != float32:
            src = cast(self, src, float32)
        rounded = torch.tensor(src.data).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.uint16).numpy(), dst_type.scalar)

    InterpreterBuilder.cast_impl = cast_impl


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    _interpret_what_is_loaded()
    _round_to_bfloat16()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels under test run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _fresh_numbers() -> None:
    """New random inputs in every run; a failure shows the seed that repeats them."""
    seed = int(os.environ.get("OUTPACE_TEST_SEED") or secrets.randbits(32))
    logging.getLogger(__name__).warning("OUTPACE_TEST_SEED=%d repeats these inputs", seed)
    torch.manual_seed(seed)


@pytest.fixture
def left_to_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies tiles as matrix units do: each output by itself, from left to right.

    Its own product adds in an order that depends on the size of the tile, and knows no bfloat16.
    """
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
            left, right = _in_fp32(a), _in_fp32(b)
            total = d.data.copy()
            for k in range(left.shape[1]):
                total += left[:, k, None] * right[None, k, :]
            return TensorHandle(total, d.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def _in_fp32(handle: Any) -> Any:
    if handle.data.dtype == np.uint16:  # bfloat16
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)

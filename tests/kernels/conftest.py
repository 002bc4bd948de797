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


def _round_to_nearest() -> None:
    """Makes the interpreter round to bf16 and fp8 as GPUs do, to the nearest even.

    It cuts the low bits of fp32 off, and takes integers and fp8 for bits of bf16.
    """
    from triton.language import bfloat16, float8e4nv, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, convert = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp
    kinds = {bfloat16: (torch.bfloat16, torch.uint16), float8e4nv: (torch.float8_e4m3fn, torch.uint8)}

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar not in kinds or src.dtype.scalar == dst_type.scalar:
            return cast(self, src, dst_type)
        if src.dtype.scalar != float32:
            src = cast(self, src, float32)
        dtype, bits = kinds[dst_type.scalar]
        return TensorHandle(torch.tensor(src.data).to(dtype).view(bits).numpy(), dst_type.scalar)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, *rounding: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (float32, float8e4nv):
            return convert(self, src, dst_type, *rounding)
        return cast_impl(self, src, dst_type)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp = cast_impl, create_fp_to_fp


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    _interpret_what_is_loaded()
    _round_to_nearest()


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

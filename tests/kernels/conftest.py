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


def _patch_once() -> None:
    """Makes the interpreter patch Triton's language once for each module. It does so before every launch and every call
    of a device function, which took half of the time of these tests."""
    from triton.runtime import interpreter

    class Kept:
        def restore(self) -> None:
            """The language stays as the interpreter needs it."""

    patch, patched = interpreter._patch_lang, set[str]()

    def patch_new(fn: Any) -> Kept:
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            patch(fn)
        return Kept()

    interpreter._patch_lang = patch_new


def _cast_as_gpus_do() -> None:
    """Makes the interpreter convert and multiply bf16 and fp8 as GPUs do, rounding to the nearest even: it cuts the low
    bits off, or takes the bits for an integer."""
    from triton.language import bfloat16, float8e4nv, float16, float32, int8, int16, int32, uint8
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    known = {bfloat16: torch.bfloat16, float8e4nv: torch.float8_e4m3fn}
    dtypes = {**known, float32: torch.float32, float16: torch.float16, uint8: torch.uint8}
    dtypes |= {int8: torch.int8, int16: torch.int16, int32: torch.int32}
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    cast, to_fp = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp
    dot = InterpreterBuilder.create_dot

    def convert(src: Any, dst_type: Any) -> Any:
        kinds = src.dtype.scalar, dst_type.scalar
        if known.keys().isdisjoint(kinds) or not dtypes.keys() >= {*kinds}:
            return None
        found = torch.tensor(src.data).view(dtypes[kinds[0]]).to(dtypes[kinds[1]])
        return TensorHandle(found.view(bits.get(found.dtype, found.dtype)).numpy(), kinds[1])

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        found = convert(src, dst_type)
        return cast(self, src, dst_type) if found is None else found

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        found = convert(src, dst_type)
        return to_fp(self, src, dst_type, rounding) if found is None else found

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.scalar != bfloat16:
            return dot(self, a, b, d, *options)
        return TensorHandle(np.matmul(_in_fp32(a), _in_fp32(b)) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    _interpret_what_is_loaded()
    _patch_once()
    _cast_as_gpus_do()


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

    Its own product adds in an order that depends on the size of the tile.
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

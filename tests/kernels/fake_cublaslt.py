"""A cublasLt in Python, which multiplies on the CPU. What it is told goes through ctypes, as with the real one."""

import ctypes
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.kernels import cublaslt

NOT_SUPPORTED = 15
STREAM = 77
KINDS = {2: torch.float16, 14: torch.bfloat16}


class FakeCublasLt:
    """The functions that `CublasLt` calls. It proposes `proposed` algorithms that are numbered in their first word."""

    def __init__(self, proposed: int = 3) -> None:
        self.proposed = proposed
        self.objects: dict[int, dict[str, Any]] = {}
        """What there is, by its address: kind and attributes."""
        self.ran: list[tuple[int, int | None]] = []
        """The number of each algorithm that ran, and its workspace."""
        self.refuses: set[int] = set()
        """Algorithms that fail."""
        self._addresses = itertools.count(4096, 64)
        self.cublasLtGetVersion = ctypes.CFUNCTYPE(ctypes.c_size_t)(lambda: 130100)
        for name, arguments in cublaslt._SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._function(name)))

    def _function(self, name: str) -> Callable[..., int]:
        kind = name.removeprefix("cublasLt").removesuffix("Create").removesuffix("Destroy").removesuffix("SetAttribute")
        if name.endswith("Create"):
            return partial(self._create, kind)
        if name.endswith("Destroy"):
            return partial(self._destroy, kind)
        if name.endswith("SetAttribute"):
            return self._set
        others: dict[str, Callable[..., int]] = {
            "cublasLtMatmulAlgoGetHeuristic": self._propose,
            "cublasLtMatmulAlgoCheck": self._check,
            "cublasLtMatmul": self._multiply,
        }
        return others[name]

    def _destroy(self, kind: str, address: int) -> int:
        return int(self.objects.pop(address)["kind"] != kind)

    def _create(self, kind: str, out: Any, *given: Any) -> int:
        out[0] = address = next(self._addresses)
        self.objects[address] = {"kind": kind, "given": given}
        return 0

    def _set(self, address: int, attribute: int, value: int, size: int) -> int:
        self.objects[address][f"attribute {attribute}"] = int.from_bytes(ctypes.string_at(value, size), "little")
        return 0

    def _propose(
        self, handle: int, op: int, a: int, b: int, c: int, d: int, pref: int, most: int, out: int, count: int
    ) -> int:
        limit = self.objects[pref][f"attribute {cublaslt.MAX_WORKSPACE_BYTES}"]
        known = [self._workspace(number) for number in range(self.proposed)]
        numbers = [number for number, space in enumerate(known) if space <= limit][:most]
        results = (cublaslt._Proposal * most).from_address(out)
        for result, number in zip(results, numbers, strict=False):
            result.algorithm[0], result.workspace = number, self._workspace(number)
        ctypes.c_int.from_address(count).value = len(numbers)
        return 0 if numbers else NOT_SUPPORTED

    def _workspace(self, number: int) -> int:
        return number * (2 << 20)

    def _check(self, handle: int, op: int, a: int, b: int, c: int, d: int, algorithm: int, result: int) -> int:
        number = ctypes.c_uint64.from_address(algorithm).value
        if number >= self.proposed:
            return NOT_SUPPORTED
        cublaslt._Proposal.from_address(result).workspace = self._workspace(number)
        return 0

    def _multiply(self, handle: int, op: int, alpha: int, a: int, a_as: int, *rest: Any) -> int:
        b, b_as, beta, c, c_as, d, d_as, algorithm, space, size, stream = rest
        number = ctypes.c_uint64.from_address(algorithm).value
        told = self.objects[op]
        assert self.objects[handle]["kind"] == ""
        assert stream == STREAM
        assert (size, space is None) == (self._workspace(number), size == 0)
        assert told[f"attribute {cublaslt.TRANSA}"] == cublaslt.TRANSPOSED
        if number in self.refuses:
            return NOT_SUPPORTED
        result = ctypes.c_float.from_address(alpha).value * (self._matrix(a, a_as) @ self._matrix(b, b_as).t()).t()
        if factor := ctypes.c_float.from_address(beta).value:
            result = result + factor * self._matrix(c, c_as)
        if f"attribute {cublaslt.EPILOGUE}" in told:
            assert told[f"attribute {cublaslt.EPILOGUE}"] == cublaslt.EPILOGUE_BIAS
            result = result + _vector(told[f"attribute {cublaslt.BIAS_POINTER}"], result.shape[1], self._dtype(d_as))
        _memory(d, result.numel(), self._dtype(d_as)).view(result.shape).copy_(result)
        self.ran.append((number, size))
        return 0

    def _dtype(self, layout: int) -> torch.dtype:
        return KINDS[self.objects[layout]["given"][0]]

    def _matrix(self, address: int, layout: int) -> Tensor:
        """Its columns as rows, in fp32."""
        _, rows, columns, leading = self.objects[layout]["given"]
        assert leading == rows
        return _memory(address, rows * columns, self._dtype(layout)).view(columns, rows).float()


def _vector(address: int, size: int, dtype: torch.dtype) -> Tensor:
    return _memory(address, size, dtype).float()


def _memory(address: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((ctypes.c_char * (size * dtype.itemsize)).from_address(address), dtype=dtype)


def aligned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers at an address that cublasLt takes."""
    size = torch.Size(shape).numel()
    memory = torch.empty(size + cublaslt.ALIGNMENT, dtype=dtype)
    skipped = -memory.data_ptr() % cublaslt.ALIGNMENT // dtype.itemsize
    found = memory[skipped : skipped + size].view(shape)
    return found.copy_(torch.randn(shape))

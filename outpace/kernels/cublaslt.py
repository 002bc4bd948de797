"""NVIDIA's cublasLt, called by ctypes: the algorithms that it knows for the product of a linear layer.

The library is the one that torch has loaded. cublasLt stores matrices column by column, so its columns are torch's
rows: out [M, N] = x [M, K] @ weight [N, K].T is D [N, M] = transposed(A [K, N]) @ B [K, M] to it.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

R_32F, COMPUTE_32F = 0, 68  # cudaDataType_t, cublasComputeType_t
DTYPES: Mapping[torch.dtype, int] = {torch.float16: 2, torch.bfloat16: 14}
TRANSA, EPILOGUE, BIAS_POINTER = 3, 7, 8  # cublasLtMatmulDescAttributes_t
TRANSPOSED = 1  # cublasOperation_t
EPILOGUE_BIAS = 4  # cublasLtEpilogue_t
MAX_WORKSPACE_BYTES, REDUCTION_SCHEMES = 1, 3  # cublasLtMatmulPreferenceAttributes_t
ANY_REDUCTION, PRECISE_REDUCTION = 6, 2  # where the depth is split: parts may be rounded before they are added, or not
"""Reductions in place are excluded: programs of one output wait for each other there, which can deadlock in a graph."""
ALIGNMENT = 256  # bytes: cublasLt assumes this alignment of every matrix when it proposes algorithms
WORKSPACES = (32 << 20, 1 << 20)
"""Limits of an algorithm's workspace in bytes: that of cuBLAS on Hopper, and that of torch for cublasLt. With less it
proposes other algorithms, some of them faster: 11.5 us instead of 13.1 for the 8B's o at 32 rows on an H200."""
PROPOSALS = 16  # requested; cublasLt returns at most 8
ALGORITHM_BYTES = 64

_Pointer, _Out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_Out,),
    "cublasLtMatmulDescCreate": (_Out, ctypes.c_int, ctypes.c_int),
    "cublasLtMatmulDescDestroy": (_Pointer,),
    "cublasLtMatmulDescSetAttribute": (_Pointer, ctypes.c_int, _Pointer, ctypes.c_size_t),
    "cublasLtMatrixLayoutCreate": (_Out, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_Pointer,),
    "cublasLtMatmulPreferenceCreate": (_Out,),
    "cublasLtMatmulPreferenceDestroy": (_Pointer,),
    "cublasLtMatmulPreferenceSetAttribute": (_Pointer, ctypes.c_int, _Pointer, ctypes.c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (*(_Pointer,) * 7, ctypes.c_int, _Pointer, _Pointer),
    "cublasLtMatmulAlgoCheck": (_Pointer,) * 8,
    "cublasLtMatmul": (*(_Pointer,) * 14, ctypes.c_size_t, _Pointer),
}
"""The arguments of each function. All return a status; 0 is success."""


class Unavailable(Exception):
    """cublasLt cannot be used here. The message says why."""


class CublasLtError(Exception):
    """A function of cublasLt returned an error."""


class Product(NamedTuple):
    """x [rows, depth] @ weight [outputs, depth].T; with a bias; with `add`, a tensor of the result's shape."""

    rows: int
    outputs: int
    depth: int
    dtype: torch.dtype
    bias: bool
    add: bool

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> "Product":
        """The product of these operands."""
        outputs, depth = weight.shape
        return cls(x.shape[0], outputs, depth, x.dtype, bias is not None, add is not None)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm of cublasLt for one product: opaque bytes, and the workspace it needs."""

    data: bytes
    workspace: int


Plan = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor], None]
"""(x, weight, bias, add, out): out = x @ weight.T + bias + add by one algorithm; out may be add. Raises
`CublasLtError`."""


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None, out: Tensor | None) -> bool:
    """Whether the layout suits all algorithms: one dtype, contiguous rows, aligned to 256 bytes."""
    given = [each for each in (x, weight, bias, add, out) if each is not None]
    if x.dim() != 2 or x.dtype not in DTYPES or any(each.dtype != x.dtype for each in given):
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        return False
    return all(each.is_contiguous() and each.data_ptr() % ALIGNMENT == 0 for each in given)


def reductions(dtype: torch.dtype) -> int:
    """How algorithms may add the parts of a split depth: rounded before or not, as torch's settings say."""
    settings = torch.backends.cuda.matmul
    half = dtype == torch.float16
    rounds = (
        settings.allow_fp16_reduced_precision_reduction if half else settings.allow_bf16_reduced_precision_reduction
    )
    return ANY_REDUCTION if rounds else PRECISE_REDUCTION


class CublasLt:
    """The library, for the device that is current when this is made. Thread-safe."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises `Unavailable`."""
        self._lock = threading.Lock()
        """One thread at a time: the address of the bias is stored in the descriptor of the product."""
        self._functions: dict[str, Any] = {}
        self._described: dict[Product, _Described] = {}
        try:
            for name, arguments in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
                self._functions[name] = function
            library.cublasLtGetVersion.restype = ctypes.c_size_t
            self.version: int = library.cublasLtGetVersion()
            self._handle = ctypes.c_void_p()  # never destroyed: graphs that were captured with it may outlive this
            self.call("cublasLtCreate", ctypes.byref(self._handle))
        except (AttributeError, CublasLtError) as error:
            raise Unavailable(f"cublasLt: {error}") from error

    @classmethod
    def find(cls) -> "CublasLt":
        """The library that torch has loaded. Raises `Unavailable`."""
        try:
            maps = Path("/proc/self/maps").read_text()
            lines = (line.split(maxsplit=5) for line in maps.splitlines() if "/libcublasLt.so" in line)
            if (path := next((parts[5] for parts in lines if len(parts) == 6), None)) is None:
                raise Unavailable("this torch has not loaded cublasLt")
            return cls(ctypes.CDLL(path))
        except OSError as error:
            raise Unavailable(f"cublasLt cannot be opened ({error})") from error

    def proposals(self, product: Product) -> list[Algorithm]:
        """The algorithms that cublasLt proposes, the most promising first."""
        described, found = self._describe(product), dict[Algorithm, None]()
        for limit in WORKSPACES:
            found.update(dict.fromkeys(self._proposals(described, limit, reductions(product.dtype))))
        return list(found)

    def checked(self, product: Product, data: bytes) -> Algorithm | None:
        """The algorithm of these bytes, which the same version proposed before; None: it does not fit this product."""
        if len(data) != ALGORITHM_BYTES:
            return None
        described, result = self._describe(product), _Proposal()
        algorithm = (ctypes.c_uint64 * 8).from_buffer_copy(data)
        try:
            self.call(
                *("cublasLtMatmulAlgoCheck", self._handle, *described), *(ctypes.byref(algorithm), ctypes.byref(result))
            )
        except CublasLtError:
            return None
        return Algorithm(data, result.workspace) if result.workspace <= max(WORKSPACES) else None

    def plan(self, product: Product, algorithm: Algorithm) -> Plan:
        """A function that computes the product by this algorithm. Operands must match `product` and pass `fits`."""
        described = self._describe(product)
        one, beta = ctypes.c_float(1.0), ctypes.c_float(1.0 if product.add else 0.0)
        data = (ctypes.c_uint64 * 8).from_buffer_copy(algorithm.data)
        a, b, d, size = described.a, described.b, described.d, algorithm.workspace

        def run(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None, out: Tensor) -> None:
            # from the caller's memory pool, so that a graph that is captured now owns it
            space = torch.empty(size, dtype=torch.uint8, device=x.device) if size else None
            with self._lock, torch.cuda.device_of(x):
                if bias is not None:
                    described.set_bias(bias.data_ptr())
                self.call(
                    "cublasLtMatmul",
                    *(self._handle, described.operation, ctypes.byref(one)),
                    *(weight.data_ptr(), a, x.data_ptr(), b, ctypes.byref(beta)),
                    *((out if add is None else add).data_ptr(), d, out.data_ptr(), d, ctypes.byref(data)),
                    *(None if space is None else space.data_ptr(), size),
                    torch.cuda.current_stream(x.device).cuda_stream,
                )

        return run

    def call(self, name: str, *arguments: Any) -> None:
        """Raises `CublasLtError` where the library reports an error."""
        if status := self._functions[name](*arguments):
            raise CublasLtError(f"{name} returned {status}")

    def made(self, owner: object, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """A descriptor, which is destroyed with its owner."""
        found = ctypes.c_void_p()
        self.call(f"cublasLt{kind}Create", ctypes.byref(found), *arguments)
        end = weakref.finalize(owner, self._functions[f"cublasLt{kind}Destroy"], found)
        end.atexit = False  # the driver may be gone by then, and the memory goes with the process
        return found

    def _describe(self, product: Product) -> "_Described":
        with self._lock:
            if product not in self._described:
                self._described[product] = _Described(self, product)
            return self._described[product]

    def _proposals(self, described: "_Described", limit: int, schemes: int) -> list[Algorithm]:
        preference, count = self.made(described, "MatmulPreference"), ctypes.c_int()
        wanted = ((MAX_WORKSPACE_BYTES, ctypes.c_uint64(limit)), (REDUCTION_SCHEMES, ctypes.c_uint32(schemes)))
        for attribute, value in wanted:
            self.call(
                *("cublasLtMatmulPreferenceSetAttribute", preference, attribute),
                *(ctypes.byref(value), ctypes.sizeof(value)),
            )
        results = (_Proposal * PROPOSALS)()
        try:
            self.call(
                *("cublasLtMatmulAlgoGetHeuristic", self._handle, *described, preference, PROPOSALS),
                *(ctypes.byref(results), ctypes.byref(count)),
            )
        except CublasLtError:
            return []  # cublasLt reports an error if it knows no algorithm
        return [Algorithm(bytes(each.algorithm), each.workspace) for each in results[: count.value] if not each.state]


class _Described:
    """The descriptors of a product."""

    def __init__(self, library: CublasLt, product: Product) -> None:
        kind, (rows, outputs, depth) = DTYPES[product.dtype], product[:3]
        self._library = library
        self.operation = library.made(self, "MatmulDesc", COMPUTE_32F, R_32F)
        self._set(TRANSA, ctypes.c_int32(TRANSPOSED))
        if product.bias:
            self._set(EPILOGUE, ctypes.c_int32(EPILOGUE_BIAS))
            self.set_bias(ALIGNMENT)  # only its alignment matters until a product is computed
        self.a = library.made(self, "MatrixLayout", kind, depth, outputs, depth)
        self.b = library.made(self, "MatrixLayout", kind, depth, rows, depth)
        self.d = library.made(self, "MatrixLayout", kind, outputs, rows, outputs)

    def __iter__(self) -> Any:
        """The operation and the layouts of A, B, C and D, as cublasLt's functions take them."""
        return iter((self.operation, self.a, self.b, self.d, self.d))

    def set_bias(self, address: int) -> None:
        """Set the address of the bias."""
        self._set(BIAS_POINTER, ctypes.c_void_p(address))

    def _set(self, attribute: int, value: Any) -> None:
        self._library.call(
            "cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.byref(value), ctypes.sizeof(value)
        )

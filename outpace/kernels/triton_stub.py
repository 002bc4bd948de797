"""Triton, or a stand-in where it is not installed, so that kernel files can be imported without it.

Triton comes with torch on CUDA machines. On a CPU the torch references run, and Triton is needed by the tests alone,
which run the kernels in its interpreter (`TRITON_INTERPRET=1`).
"""

from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Missing:
        """Answers every attribute and call with itself; a launch raises."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

        def __getitem__(self, grid: Any) -> Any:
            raise ImportError("this kernel needs Triton: pip install triton")

    triton = tl = _Missing()

NATIVE = tl.constexpr(HAS_TRITON and torch.version.cuda is not None and torch.cuda.is_available())
"""Whether kernels run on an NVIDIA GPU, and not in Triton's interpreter, which cannot run PTX."""

__all__ = ["HAS_TRITON", "NATIVE", "tl", "triton"]

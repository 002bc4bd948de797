"""Checks of `kernels.compile_ahead` on a machine without a GPU: run as a program in which TRITON_INTERPRET is not set.

`python -m tests.kernels.compiling_ahead CHECK`, with an empty folder in TRITON_CACHE_DIR.
"""

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from triton import knobs

from outpace.kernels import compile_ahead
from outpace.kernels.activation import gated_act_triton
from outpace.kernels.compile_ahead import Source, collect, only_compiled
from outpace.kernels.embedding import embed_triton
from outpace.kernels.quantize import quantize_rows_triton
from outpace.kernels.rms_norm import rms_norm_triton
from outpace.log import logger
from tests.kernels.compiling import compile_instead
from tests.kernels.launches import FP32, INT64, meta


def launch() -> None:
    """Six kernels; each twice."""
    for _ in range(2):
        for dtype in (torch.bfloat16, torch.float16):
            rms_norm_triton(meta(4, 256, dtype=dtype), meta(256, dtype=dtype), 1e-5)
            gated_act_triton(meta(4, 256, dtype=dtype), "silu")
        embed_triton(meta(4, dtype=INT64), meta(8, 64))
        quantize_rows_triton(meta(4, 64, dtype=FP32), "int8")


def compiled_now() -> tuple[int, int]:
    """Launch in the usual way: how many were compiled, and how many found on the disk."""
    hits: list[bool] = []
    knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    with compile_instead():
        launch()
    return hits.count(False), hits.count(True)


def no_children() -> bool:
    """Whether no process is left behind."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def collects() -> None:
    """Every kernel is told once, nothing is launched, and memory that nobody wrote is zero."""
    seen: set[Any] = set()
    assert len(collect(launch, seen)) == 6
    assert collect(launch, seen) == []
    assert knobs.runtime.jit_cache_hook is None
    made: list[torch.Tensor] = []

    def step() -> None:
        x = torch.empty(1000, dtype=torch.int64)
        made.extend([x, x.new_empty(1000), torch.empty_like(x)])

    collect(step, seen)
    with compile_ahead.launching_nothing():
        launch()
        step()
    assert not any(x.any() for x in made)


def finds() -> None:
    """What the processes compiled is on the disk, under the names that a launch looks for."""
    compile_ahead.compile_ahead([launch])
    assert no_children()
    assert not any(source.on_disk() is False for source in collect(launch, set()))
    assert compiled_now() == (0, 6)


def begins_early() -> None:
    """What one step launches is being compiled while the next is looked through; few kernels more get a process too."""
    forks, begun = list[int](), list[int]()
    fork = os.fork

    def counted() -> int:
        child = fork()
        forks.extend([child] if child else [])
        return child

    def more() -> None:
        begun.append(len(forks))
        quantize_rows_triton(meta(4, 64, dtype=torch.bfloat16), "int8")

    with mock.patch.object(os, "fork", counted):
        waited = compile_ahead.compile_ahead([launch, more], meanwhile=lambda: begun.append(len(forks)))
    assert waited > 0
    assert begun == [min(6, len(os.sched_getaffinity(0))), len(forks)]
    assert len(forks) == begun[0] + 1
    assert no_children()
    assert not any(source.on_disk() is False for step in (launch, more) for source in collect(step, set()))


def needs_nothing() -> None:
    """With all of it on the disk no process is started, and the third step is not run."""
    compiled_now()
    for function in rms_norm_triton, gated_act_triton, embed_triton, quantize_rows_triton:
        for value in function.__globals__.values():
            if isinstance(value, triton.JITFunction):
                value.device_caches.clear()  # as in a new process
    ran: list[int] = []

    def step() -> None:
        launch()
        ran.append(1)

    with mock.patch.object(os, "fork", _refuse), mock.patch.object(logger, "debug", _refuse):
        compile_ahead.compile_ahead([step] * 3)
    assert len(ran) == 2


def _refuse(*args: Any) -> Any:
    print("called:", *args, file=sys.stderr)
    os._exit(1)


def loses_nothing() -> None:
    """A process dies, another hangs, a third fails: a launch compiles what is missing, and no process is left."""
    compile_ahead.PATIENCE = 0.1
    original, dying = Source.compile, {"_quantize_rows_kernel": lambda: os._exit(1), "_embed_kernel": signal.pause}

    def compile_badly(self: Source) -> None:
        dying.get(self.source.name, lambda: original(self))()
        raise ValueError(self.source.name)

    Source.compile = compile_badly  # type: ignore[method-assign]
    compile_ahead.compile_ahead([launch])
    assert no_children()
    assert sum(compiled_now()) == 6


def restores() -> None:
    """After an error in a step the hook is as before, and the error is not the caller's."""

    def step() -> None:
        launch()
        raise ValueError("a step that fails")

    compile_ahead.compile_ahead([step])
    assert knobs.runtime.jit_cache_hook is None
    assert compiled_now() == (6, 0)


def leaves_others_alone() -> None:
    """Where somebody has a hook of his own, nothing is done."""
    knobs.runtime.jit_cache_hook = own = lambda **told: None
    compile_ahead.compile_ahead([_refuse])
    assert knobs.runtime.jit_cache_hook is own


def compiles_nothing() -> None:
    """`only_compiled`: a launch that would compile raises, in this thread alone, and what is in memory stays usable."""
    with compile_instead(), only_compiled():
        with pytest.raises(RuntimeError, match="not compiled yet: _rms_norm_kernel"):
            launch()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(launch).result()
        launch()
    assert knobs.runtime.jit_cache_hook is None


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        *(collects, finds, begins_early, needs_nothing, loses_nothing, restores, leaves_others_alone),
        compiles_nothing,
    )
}

if __name__ == "__main__":
    with compile_instead():  # every launch from now on is what it would be on Hopper
        pass
    CHECKS[sys.argv[1]]()

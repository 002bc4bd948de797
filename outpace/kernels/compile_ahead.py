"""Kernels compiled by several processes before they are first launched: Triton's front end is Python and holds the GIL.

The steps that will launch them run once while Triton is told to launch nothing, which says what there is to compile.
Processes compile it into Triton's own cache on disk, where a launch then finds it. Whatever goes wrong here loses
nothing: a kernel that is not there is compiled when it is first launched, which also reports its errors.
"""

import gc
import hashlib
import json
import os
import select
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import FileIO
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outpace.kernels.triton_stub import HAS_TRITON
from outpace.log import chosen, logger

MOST = 16  # processes
FEW = 4  # kernels that are not worth any process
PATIENCE = 60.0  # seconds without a kernel that is done, before the processes are given up
UNINITIALISED = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
)
HOOKED = threading.Lock()
"""Held by the thread that Triton's hook is for: there is one in a process."""
Seen = tuple[Any, str]
"""A kernel, and what Triton calls this form of it."""


@dataclass(frozen=True)
class Source:
    """What Triton compiles one kernel from."""

    source: Any
    """triton.compiler.ASTSource."""
    target: Any
    options: dict[str, Any]

    @classmethod
    def of(cls, function: Any, told: dict[str, Any]) -> "Source":
        """From what Triton's hook is told. The options are in JSON alone, which has no tuples."""
        from triton.compiler import ASTSource
        from triton.runtime import driver

        given = json.loads(told["specialization_data"])["options"]
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        source = ASTSource(function, told["signature"], told["constants"], told["configs"][0])
        return cls(source, driver.active.get_current_target(), options)

    def on_disk(self) -> bool:
        """Whether Triton's cache has it."""
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.compiler import make_backend
        from triton.runtime.cache import get_cache_key, get_cache_manager

        backend = make_backend(self.target)
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(self.source, backend, options, env_vars=get_cache_invalidating_env_vars())
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(manager.get_group(f"{self.source.name[:150]}.json"))

    def compile(self) -> None:
        """Into the cache, and what launches it too, where that is a module of its own (until Triton 3.6)."""
        import triton
        from triton.runtime import driver

        made = triton.compile(self.source, target=self.target, options=self.options)
        driver.active.launcher_cls(self.source, made.metadata)


def compile_ahead(steps: Iterable[Callable[[], object]]) -> None:
    """Compile what these steps launch and neither memory nor disk has.

    The steps must not look at what they compute, nor use other threads. If the first two need nothing, the others are
    taken to need nothing either.
    """
    if not HAS_TRITON or not _can_collect():
        return
    seen: set[Seen] = set()
    missing: list[Source] = []
    try:
        for number, step in enumerate(steps):
            missing += [source for source in collect(step, seen) if not source.on_disk()]
            if number == 1 and not missing:
                return
        if len(missing) > FEW:
            compile_in_processes(missing)
    except Exception as error:
        logger.debug("kernels are compiled when they are first launched (%s: %s)", type(error).__name__, error)


def _can_collect() -> bool:
    """Whether kernels are compiled at all, and nobody else has a hook of his own."""
    from triton import knobs

    return not knobs.runtime.interpret and knobs.runtime.jit_cache_hook is None


def collect(step: Callable[[], object], seen: set[Seen]) -> list[Source]:
    """What a step would compile and no step has before; none of it is launched."""
    found: list[Source] = []

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        if (fn.jit_function, key) not in seen:
            seen.add((fn.jit_function, key))
            found.append(Source.of(fn.jit_function, compile))
        return True

    with _hooked(hook), _Zeros():
        step()
    return found


@contextmanager
def only_compiled() -> Iterator[None]:
    """Inside, a launch that would have to compile or load a kernel raises: during a capture it must not."""

    def hook(*, repr: str, **rest: Any) -> bool:
        raise RuntimeError(f"not compiled yet: {repr}")

    with _hooked(hook) if HAS_TRITON else nullcontext():
        yield


@contextmanager
def _hooked(hook: Callable[..., bool]) -> Iterator[None]:
    """Triton's hook before it compiles, for launches of this thread; those of others are not touched."""
    from triton import knobs

    here = threading.get_ident()
    with HOOKED:
        before = knobs.runtime.jit_cache_hook

        def for_this_thread(**told: Any) -> bool:
            if threading.get_ident() == here:
                return hook(**told)
            return before is not None and bool(before(**told))

        knobs.runtime.jit_cache_hook = for_this_thread
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before


class _Zeros(TorchFunctionMode):
    """New memory holds zeros: an index that no kernel has written is still one that exists."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNINITIALISED else made


def compile_in_processes(sources: Iterable[Source]) -> None:
    """Compile all of them, the longest first: each process takes the next when it is done with one."""
    todo = sorted(sources, key=lambda source: -len(source.source.fn.src))[:256]  # a number is one byte
    count = min(MOST, len(os.sched_getaffinity(0)), len(todo))
    chosen("processes that compile kernels", count, f"{len(todo)} are not in Triton's cache")
    import triton.compiler.code_generator  # noqa: F401  once, and not by each process

    children: list[int] = []
    with _pipe() as (wanted, numbers), _pipe() as (heard, tell):
        try:
            numbers.write(bytes(range(len(todo))))
            numbers.close()
            for _ in range(count):
                children.append(_fork(lambda: _compile_some(todo, wanted, heard, tell)))
            tell.close()
            _wait(heard, len(todo))
        finally:
            for child in children:
                _end(child)


@contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    read, write = os.pipe()
    with FileIO(read, "rb") as out, FileIO(write, "wb") as into:
        yield out, into


def _fork(run: Callable[[], None]) -> int:
    """A process that runs this and ends without a word, in a group of its own; its number."""
    with warnings.catch_warnings():  # Python says that threads and fork do not go together
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _run_and_exit(run)
    with suppress(OSError):
        os.setpgid(child, child)
    return child


def _run_and_exit(run: Callable[[], None]) -> NoReturn:
    """In the child: nothing of the parent's is freed here, since that may be memory of the device."""
    try:
        gc.disable()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        run()
    finally:
        os._exit(0)


def _compile_some(todo: list[Source], wanted: FileIO, heard: FileIO, tell: FileIO) -> None:
    from triton.runtime import driver

    heard.close()  # the parent's: if it is gone, the next word ends this process
    driver.active.get_current_target = lambda: todo[0].target  # otherwise torch is asked, which is no good after a fork
    while number := wanted.read(1):
        with suppress(Exception):
            todo[number[0]].compile()
        tell.write(number)


def _wait(heard: FileIO, count: int) -> None:
    """Until so many are done, all processes have ended, or nothing happens any more."""
    news = select.poll()
    news.register(heard, select.POLLIN)
    while count > 0 and news.poll(PATIENCE * 1000) and (done := heard.read(count)):
        count -= len(done)
    if count > 0:
        logger.debug("%d kernels were not compiled ahead of their first launch", count)


def _end(child: int) -> None:
    """End a process and what it has started. It has nothing left to do, or hangs."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)

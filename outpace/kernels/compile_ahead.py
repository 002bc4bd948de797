"""Several processes compile kernels before their first launch: Triton's front end is Python and holds the GIL.

Each step runs once with launches turned off, which shows the kernels that it needs. Processes compile them into
Triton's own cache on disk, where the first launch finds them; they start while later steps are still being run. A
failure here is harmless: a kernel that is not in the cache is compiled at its first launch, which reports its errors.
"""

import gc
import hashlib
import json
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outpace.kernels.triton_stub import HAS_TRITON
from outpace.log import chosen, logger

MOST = 16  # processes that are started at a time
FEW = 4  # so few kernels are not worth a process
PATIENCE = 60.0  # seconds to wait for the next finished kernel
UNINITIALISED = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
)
HOOKED = threading.Lock()
"""Held by the thread that has set Triton's hook: a process has only one."""
Seen = tuple[Any, str]
"""A kernel, and Triton's key of one specialization."""


@dataclass(frozen=True)
class Source:
    """The input of Triton's compiler for one kernel."""

    source: Any
    """triton.compiler.ASTSource."""
    target: Any
    options: dict[str, Any]

    @classmethod
    def of(cls, function: Any, info: dict[str, Any]) -> "Source":
        """From the argument `compile` of Triton's hook, which has the options as JSON only: lists were tuples."""
        from triton.compiler import ASTSource
        from triton.runtime import driver

        given = json.loads(info["specialization_data"])["options"]
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        source = ASTSource(function, info["signature"], info["constants"], info["configs"][0])
        return cls(source, driver.active.get_current_target(), options)

    def on_disk(self) -> bool:
        """Whether Triton's cache has the compiled kernel."""
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.compiler import make_backend
        from triton.runtime.cache import get_cache_key, get_cache_manager

        backend = make_backend(self.target)
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(self.source, backend, options, env_vars=get_cache_invalidating_env_vars())
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(manager.get_group(f"{self.source.name[:150]}.json"))

    def compile(self) -> None:
        """Compile into the cache; also the launcher, where that is a separate module (until Triton 3.6)."""
        import triton
        from triton.runtime import driver

        made = triton.compile(self.source, target=self.target, options=self.options)
        driver.active.launcher_cls(self.source, made.metadata)


@cache
def getting_ready() -> tuple[threading.Thread, ...]:
    """Threads that do the one-time work on the host that Triton needs before its first kernel."""
    if not HAS_TRITON:
        return ()
    threads = tuple(threading.Thread(target=run, name="triton", daemon=True) for run in (_hash_library, _make_driver))
    for thread in threads:
        thread.start()
    return threads


def _hash_library() -> None:
    """Compute Triton's key of its own version: the hash of a library of 400 MB, 0.6 s."""
    with suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def _make_driver() -> None:
    """Load Triton's driver; if its cache is empty, the C compiler builds a part of it."""
    with suppress(Exception):
        from triton.runtime import driver

        _ = driver.active.utils


def compile_ahead(steps: Iterable[Callable[[], object]], meanwhile: Callable[[], object] = bool) -> float:
    """Compile the kernels of these steps that are neither in memory nor on disk; returns the seconds spent waiting.

    The steps must not read what they compute, nor use other threads. If the first two need nothing, the others are
    assumed to need nothing either. Steps whose kernels take longest to compile should come first. `meanwhile` is always
    called once: while the processes compile, if there are any.
    """
    if not HAS_TRITON or not _can_collect():
        meanwhile()
        return 0.0
    *_, driver = getting_ready()
    driver.join()
    with _Processes() as processes:
        try:
            _compile_missing(steps, processes)
        except Exception as error:
            logger.debug("kernels are compiled when they are first launched (%s: %s)", type(error).__name__, error)
        meanwhile()
        begin = time.perf_counter()
        processes.wait()
        return time.perf_counter() - begin


def _compile_missing(steps: Iterable[Callable[[], object]], processes: "_Processes") -> None:
    seen: set[Seen] = set()
    missing: list[Source] = []
    for number, step in enumerate(steps):
        found = collect(step, seen)
        for thread in getting_ready():
            thread.join()
        missing += [source for source in found if not source.on_disk()]
        if number == 1 and not missing and not processes:
            return
        if len(missing) > FEW or (missing and processes):
            processes.begin(missing)
            missing = []


def _can_collect() -> bool:
    """Whether kernels are compiled, not interpreted, and Triton's hook is free."""
    from triton import knobs

    return not knobs.runtime.interpret and knobs.runtime.jit_cache_hook is None


def collect(step: Callable[[], object], seen: set[Seen]) -> list[Source]:
    """The kernels of a step that are neither in memory nor in `seen`; none of them is launched."""
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
def launching_nothing() -> Iterator[None]:
    """Inside, kernels that are not in memory are neither compiled nor launched, so results are meaningless."""
    with _hooked(lambda **_: True) if HAS_TRITON else nullcontext(), _Zeros():
        yield


@contextmanager
def only_compiled() -> Iterator[None]:
    """Inside, a launch that would have to compile or load a kernel raises: a capture does not allow it."""

    def hook(*, repr: str, **rest: Any) -> bool:
        raise RuntimeError(f"not compiled yet: {repr}")

    with _hooked(hook) if HAS_TRITON else nullcontext():
        yield


@contextmanager
def _hooked(hook: Callable[..., bool]) -> Iterator[None]:
    """Set the hook that Triton calls before it compiles, for launches of this thread only."""
    from triton import knobs

    here = threading.get_ident()
    with HOOKED:
        before = knobs.runtime.jit_cache_hook

        def for_this_thread(**info: Any) -> bool:
            if threading.get_ident() == here:
                return hook(**info)
            return before is not None and bool(before(**info))

        knobs.runtime.jit_cache_hook = for_this_thread
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before


class _Zeros(TorchFunctionMode):
    """New memory holds zeros, so that an index is valid although no kernel has written it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNINITIALISED else made


class _Processes:
    """Processes that compile kernels. The end of the `with` ends them."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._children: list[int] = []
        self._most = min(MOST, len(os.sched_getaffinity(0)))

    def __enter__(self) -> Self:
        read, write = os.pipe()
        self._finished, self._report = FileIO(read, "rb"), FileIO(write, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            _end(child)
        self._finished.close()
        self._report.close()

    def __len__(self) -> int:
        return len(self._children)

    def begin(self, sources: Iterable[Source]) -> None:
        """Start processes that compile these, the longest first. Each takes the next kernel when it has finished one.

        For a moment there may be twice as many processes as cores: a few kernels take much longer than the others.
        """
        import triton.compiler.code_generator  # noqa: F401  imported once, not by each process

        first = len(self._sources)
        self._sources += sorted(sources, key=lambda source: -len(source.source.fn.src))
        del self._sources[256:]  # the pipe sends one byte for each kernel
        todo = range(first, len(self._sources))
        count = min(len(todo), self._most, max(1, 2 * self._most - sum(map(_runs, self._children))))
        with _pipe() as (wanted, numbers):
            numbers.write(bytes(todo))
            numbers.close()
            for _ in range(count):
                child = _fork(lambda: _compile_some(self._sources, wanted, self._finished, self._report))
                self._children.append(child)

    def wait(self) -> None:
        """Wait until all is compiled, or the processes have ended or hang."""
        if self._children:
            count, what = len(self._children), f"{len(self._sources)} are not in Triton's cache"
            chosen("processes that compile kernels", count, what)
            self._report.close()
            _wait(self._finished, len(self._sources))


@contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    read, write = os.pipe()
    with FileIO(read, "rb") as out, FileIO(write, "wb") as into:
        yield out, into


def _fork(run: Callable[[], None]) -> int:
    """Start a process that runs this silently, in its own process group; returns its id."""
    with warnings.catch_warnings():  # Python warns against fork in a process with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _run_and_exit(run)
    with suppress(OSError):
        os.setpgid(child, child)
    return child


def _run_and_exit(run: Callable[[], None]) -> NoReturn:
    """Run in the child. Nothing of the parent's is freed here: it may be memory of the device."""
    try:
        gc.disable()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        run()
    finally:
        os._exit(0)


def _compile_some(todo: list[Source], wanted: FileIO, finished: FileIO, report: FileIO) -> None:
    from triton.runtime import driver

    finished.close()  # the parent's end: if the parent has ended, the next report fails and ends this process
    driver.active.get_current_target = lambda: todo[0].target  # otherwise Triton asks torch, which fails after a fork
    while number := wanted.read(1):
        with suppress(Exception):
            todo[number[0]].compile()
        report.write(number)


def _wait(finished: FileIO, count: int) -> None:
    """Wait until `count` kernels are done, all processes have ended, or none has finished a kernel for PATIENCE."""
    news = select.poll()
    news.register(finished, select.POLLIN)
    while count > 0 and news.poll(PATIENCE * 1000) and (done := finished.read(count)):
        count -= len(done)
    if count > 0:
        logger.debug("%d kernels were not compiled ahead of their first launch", count)


def _runs(child: int) -> bool:
    """Whether a process still runs. One that has ended stays a zombie, so that its id is not used again."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _end(child: int) -> None:
    """Kill a process and its children. It has nothing left to do, or hangs."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)

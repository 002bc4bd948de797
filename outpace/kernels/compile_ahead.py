"""Kernels compiled by several processes before they are first launched: Triton's front end is Python and holds the GIL.

The steps that will launch them run once while Triton is told to launch nothing, which says what there is to compile.
Processes compile it into Triton's own cache on disk, where a launch then finds it; the first begin while other steps
are still looked through. Whatever goes wrong here loses nothing: a kernel that is not there is compiled when it is
first launched, which also reports its errors.
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

MOST = 16  # processes that begin at once
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


@cache
def getting_ready() -> tuple[threading.Thread, ...]:
    """Threads that do what Triton does once, on the host alone, before its first kernel."""
    threads = tuple(threading.Thread(target=run, name="triton", daemon=True) for run in (_hash_library, _make_driver))
    for thread in threads if HAS_TRITON else ():
        thread.start()
    return threads if HAS_TRITON else ()


def _hash_library() -> None:
    """What Triton calls its own version: the hash of a library of 400 MB, 0.6 s."""
    with suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def _make_driver() -> None:
    """Where its cache is empty, Triton compiles a part of its driver with the C compiler."""
    with suppress(Exception):
        from triton.runtime import driver

        _ = driver.active.utils


def compile_ahead(steps: Iterable[Callable[[], object]], meanwhile: Callable[[], object] = bool) -> float:
    """Compile what these steps launch and neither memory nor disk has; the seconds in which there was only to wait.

    The steps must not look at what they compute, nor use other threads. If the first two need nothing, the others are
    taken to need nothing either. Those with the kernels that take longest should come first. `meanwhile` is called
    once, in any case: while the processes compile, if there are any.
    """
    if not HAS_TRITON or not _can_collect():
        meanwhile()
        return 0.0
    *_, driver = getting_ready()
    driver.join()
    with _Processes() as processes:
        try:
            _look_through(steps, processes)
        except Exception as error:
            logger.debug("kernels are compiled when they are first launched (%s: %s)", type(error).__name__, error)
        meanwhile()
        begin = time.perf_counter()
        processes.wait()
        return time.perf_counter() - begin


def _look_through(steps: Iterable[Callable[[], object]], processes: "_Processes") -> None:
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
def launching_nothing() -> Iterator[None]:
    """Inside, kernels that are not in memory are neither compiled nor launched: what is computed means nothing."""
    with _hooked(lambda **_: True) if HAS_TRITON else nullcontext(), _Zeros():
        yield


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


class _Processes:
    """Processes that compile kernels, and end with this one's `with`."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._children: list[int] = []
        self._most = min(MOST, len(os.sched_getaffinity(0)))

    def __enter__(self) -> Self:
        read, write = os.pipe()
        self._heard, self._tell = FileIO(read, "rb"), FileIO(write, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            _end(child)
        self._heard.close()
        self._tell.close()

    def __len__(self) -> int:
        return len(self._children)

    def begin(self, sources: Iterable[Source]) -> None:
        """Compile these too, the longest first: each new process takes the next when it is done with one.

        There may be twice as many processes as cores for a moment: most kernels take much less time than a few do.
        """
        import triton.compiler.code_generator  # noqa: F401  once, and not by each process

        first = len(self._sources)
        self._sources += sorted(sources, key=lambda source: -len(source.source.fn.src))
        del self._sources[256:]  # a number is one byte
        todo = range(first, len(self._sources))
        count = min(len(todo), self._most, max(1, 2 * self._most - sum(map(_runs, self._children))))
        with _pipe() as (wanted, numbers):
            numbers.write(bytes(todo))
            numbers.close()
            for _ in range(count):
                child = _fork(lambda: _compile_some(self._sources, wanted, self._heard, self._tell))
                self._children.append(child)

    def wait(self) -> None:
        """Until all is compiled, or nothing happens any more."""
        if self._children:
            count, what = len(self._children), f"{len(self._sources)} are not in Triton's cache"
            chosen("processes that compile kernels", count, what)
            self._tell.close()
            _wait(self._heard, len(self._sources))


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


def _runs(child: int) -> bool:
    """Whether a process has not ended; one that has stays to be waited for, so that its number is not used again."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _end(child: int) -> None:
    """End a process and what it has started. It has nothing left to do, or hangs."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)

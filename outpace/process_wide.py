"""Switches of the whole process that are set for a while, each behind a lock: threads must not undo each other's."""

import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

_ENVIRONMENT: Final = threading.RLock()


class _Collector:
    """Python's garbage collector, off while anybody needs it off. Two threads that each saved `gc.isenabled` would turn
    it on in the middle of the other's work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # not held while it is off: imports wait for other threads
        self._users = 0
        self._was_on = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Collect no garbage inside."""
        with self._lock:
            if self._users == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._was_on:
                    gc.enable()


COLLECTOR: Final = _Collector()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that gloo or transformers reads and takes in no other way. One user at a time."""
    if not variables:
        yield  # nobody waits for a start that needs none
        return
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

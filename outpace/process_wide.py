"""Changes settings of the whole process for a while, under locks, so that threads do not undo each other's changes."""

import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

_ENVIRONMENT: Final = threading.RLock()


class _Collector:
    """Turns garbage collection off while at least one thread needs it off. If each thread saved and restored
    `gc.isenabled` itself, one would turn it on during the work of another."""

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
    """Set environment variables, for settings that gloo and transformers take in no other way. One user at a time."""
    if not variables:
        yield  # nothing to set, so do not wait for other users
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

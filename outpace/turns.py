"""A lock that threads get in the order in which they asked."""

import threading
from collections import deque


class Turns:
    """`threading.Lock` would let a thread that has just released it take it again at once, while others starve."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()  # each held until its thread's turn has come

    def __enter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()
        except BaseException:  # an interrupt: leave the queue, or pass the lock on if it was given meanwhile
            with self._guard:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                else:
                    self._hand_on()
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._hand_on()

    def _hand_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._taken = False

"""A cache limited by bytes, which evicts the least recently used entries."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SizedCache(Generic[Key, Value]):
    """Values by key. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self.num_bytes = 0
        """Size of all entries."""

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Key) -> Value | None:
        """The value; None: it is not here, or was evicted."""
        entry = self._found.get(key)
        if entry is None:
            return None
        self._found.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: Value, size: int) -> list[Key]:
        """Keep a value of `size` bytes. Returns the evicted keys, which may include this one."""
        if key in self._found:
            self.num_bytes -= self._found.pop(key)[1]
        self._found[key] = value, size
        self.num_bytes += size
        gone = []
        while self.num_bytes > self._max_bytes:
            old, (_, freed) = self._found.popitem(last=False)
            self.num_bytes -= freed
            gone.append(old)
        return gone

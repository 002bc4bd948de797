"""Who sent the current request, and what this caller may do: share of the steps, priorities, cached prefixes."""

from collections.abc import Sequence
from contextvars import ContextVar

from outpace.server.engine import ANYBODY, Caller
from outpace.server.options import ApiKey, ServerConfig
from outpace.server.problems import bad

CALLER: ContextVar[int | None] = ContextVar("outpace_caller", default=None)
"""Index of the API key of the current request, set by the guard; None where the server has no keys."""


class Callers:
    """Knows the API keys of a server. The caller is that of the current request."""

    def __init__(self, options: ServerConfig, keys: Sequence[ApiKey]) -> None:
        self._options, self._keys = options, keys

    def current(self) -> Caller:
        """The caller, by its API key; without keys all requests have the same caller."""
        index = CALLER.get()
        return ANYBODY if index is None else Caller(f"key-{index}", self._keys[index].weight)

    def salt(self, given: str | None) -> str:
        """The salt of cached prefixes. Keys do not share prefixes: the time to the first token shows what is cached."""
        name = self.current().name
        return (given or "") if self._options.share_prefix_cache or not name else f"{name}\0{given or ''}"

    def priority(self, given: int | None) -> int:
        """The requested priority, if this caller may have it; without one, the nearest to 0 that it may have."""
        if not self._options.allow_priority:
            if given:
                raise bad("priority", "this server does not let requests set it (the option allow_priority does)")
            return 0
        index = CALLER.get()
        low, high = self._options.priorities(None if index is None else self._keys[index])
        if not given:
            return min(max(0, low), high)
        if not low <= given <= high:
            raise bad("priority", f"expected {low} to {high}, the bounds of this key")
        return given

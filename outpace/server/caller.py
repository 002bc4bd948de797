"""Whose request is being answered: set by the guard, read where callers are kept apart (queues, caches, limits)."""

from contextvars import ContextVar

CALLER: ContextVar[int | None] = ContextVar("outpace_caller", default=None)
"""Index of the API key of the current request; None where the server has no keys."""

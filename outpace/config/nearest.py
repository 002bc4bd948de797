"""The name that was probably meant by one that is unknown."""

import difflib
from collections.abc import Iterable

CLOSE = 0.72
"""How alike two names must be, as difflib counts."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant: one that has this or its words in it, or that is spelled alike."""
    asked = _plain(name)

    def likeness(other: str) -> float:
        plain = _plain(other)
        same = difflib.SequenceMatcher(None, asked, plain).ratio()
        has_it = len(asked) > 2 and (plain.startswith(asked) or f"-{asked}" in plain)
        has_its_words = set(asked.split("-")) <= set(plain.split("-"))
        return same + (has_it or has_its_words or asked.startswith(f"{plain}-"))

    best = max(sorted(known), key=likeness, default="")
    return best if best and likeness(best) >= CLOSE else None


def _plain(name: str) -> str:
    return name.strip("-").replace("_", "-").lower()

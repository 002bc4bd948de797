"""Suggestions for unknown names."""

import difflib
from collections.abc import Iterable

CLOSE = 0.72
"""Least similarity of two names, as difflib computes it."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like an unknown one: it contains that name or its words, or is spelled alike."""
    asked = _plain(name)

    def likeness(other: str) -> float:
        plain = _plain(other)
        same = difflib.SequenceMatcher(None, asked, plain).ratio()
        has_it = len(asked) > 2 and (plain.startswith(asked) or f"-{asked}" in plain)
        has_its_words = set(asked.split("-")) <= set(plain.split("-"))
        return same + (has_it or has_its_words or asked.startswith(f"{plain}-"))

    best = max(sorted(known), key=likeness, default="")
    return best if best and likeness(best) >= CLOSE else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the name that was probably meant, if there is one."""
    meant = nearest(str(name), known)
    return f": did you mean {meant!r}?" if meant else ""


def _plain(name: str) -> str:
    return name.strip("-").replace("_", "-").lower()

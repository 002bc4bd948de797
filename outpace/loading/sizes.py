"""Sizes as people read them. Imports no torch."""

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))


def size_text(nbytes: float) -> str:
    """In GB, MB, KB or bytes, whichever leaves digits to read."""
    for factor, unit in _UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} bytes"

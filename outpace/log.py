"""One logger, and one line per automatic choice: `chosen: value (reason)`."""

import logging
from collections.abc import Mapping

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))

logger = logging.getLogger("outpace")
logger.addHandler(logging.NullHandler())


def by_part(seconds: Mapping[str, float], weight_bytes: int = 0, least: float = 0.0) -> str:
    """Seconds of the parts of a start, as text: `weights 0.50 s (16.1 GB, 32.1 GB/s)`; without parts below `least`."""
    size = size_text(weight_bytes, 1)
    return ", ".join(
        f"{part} {took:.2f} s"
        + (f" ({size}, {size_text(weight_bytes / took, 1)}/s)" if part == "weights" and weight_bytes else "")
        for part, took in seconds.items()
        if took >= least
    )


def size_text(nbytes: float, digits: int = 2) -> str:
    """A number of bytes in the largest unit of GB, MB and KB in which it is at least 1."""
    for factor, unit in _UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.{digits}f} {unit}"
    return f"{nbytes:.0f} bytes"


def chosen(what: str, value: object, reason: str) -> None:
    """Log an automatic choice with the reason for it."""
    logger.info("%s: %s (%s)", what, value, reason)

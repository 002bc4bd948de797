"""One logger, and one line per automatic choice: `chosen: value (reason)`."""

import logging
from collections.abc import Mapping

logger = logging.getLogger("outpace")
logger.addHandler(logging.NullHandler())


def by_part(seconds: Mapping[str, float], weight_bytes: int = 0, least: float = 0.0) -> str:
    """What a start took, part by part: `weights 0.50 s (16.1 GB, 32.1 GB/s)`; parts below `least` are left out."""
    size = weight_bytes / 1e9
    return ", ".join(
        f"{part} {took:.2f} s" + (f" ({size:.1f} GB, {size / took:.1f} GB/s)" if part == "weights" and size else "")
        for part, took in seconds.items()
        if took >= least
    )


def chosen(what: str, value: object, reason: str) -> None:
    """Log an automatic choice with the reason for it."""
    logger.info("%s: %s (%s)", what, value, reason)

"""One logger, and one line per automatic choice: `chosen: value (reason)`."""

import logging

logger = logging.getLogger("outpace")
logger.addHandler(logging.NullHandler())


def chosen(what: str, value: object, reason: str) -> None:
    """Log an automatic choice with the reason for it."""
    logger.info("%s: %s (%s)", what, value, reason)

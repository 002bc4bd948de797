"""The server's log: lines on standard error, for people or as JSON."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from outpace.log import logger

LONGEST = 4 * 2**10
"""Characters of a message, and of a traceback; the middle of a longer one is dropped."""


def set_up(*, as_json: bool = False, name: str = "") -> None:
    """Write the log of Outpace to standard error: warnings, and a line for each request.

    name: of this process, if several write to one place.
    """
    handler = logging.StreamHandler(sys.stderr)
    shown = f"{name}: ".replace("%", "%%") if name else ""
    handler.setFormatter(JsonLines(name) if as_json else Lines(f"%(asctime)s %(levelname)s {shown}%(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logging.getLogger("outpace.access").setLevel(logging.INFO)


class Lines(logging.Formatter):
    """Lines of limited length: the traceback of a deep recursion would fill the disk."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The line itself."""
        return bounded(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The traceback below it."""
        return bounded(super().formatException(ei))


def bounded(text: str) -> str:
    """The text, without its middle if it is longer than `LONGEST`."""
    half = LONGEST // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"


class JsonLines(Lines):
    """One JSON object per line; a line of the access log has its own fields."""

    def __init__(self, name: str = "") -> None:
        """name: of this process, to be shown in each line."""
        super().__init__()
        self._name = {"process": name} if name else {}

    def format(self, record: logging.LogRecord) -> str:
        """A record as a line."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": moment, "level": record.levelname.lower(), "logger": record.name, **self._name}
        said: Mapping[str, object] = {"message": bounded(record.getMessage())}
        if isinstance(record.args, Mapping):
            said = record.args
        elif record.exc_info:
            said = {**said, "traceback": self.formatException(record.exc_info)}
        return json.dumps({**line, **said}, ensure_ascii=False, default=str)

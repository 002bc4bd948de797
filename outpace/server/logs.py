"""The server's log: lines on standard error, for people or as JSON."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from outpace.log import logger


def set_up(*, as_json: bool = False) -> None:
    """Write the log of Outpace to standard error: warnings, and a line for each request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logging.getLogger("outpace.access").setLevel(logging.INFO)


class JsonLines(logging.Formatter):
    """One object in each line; what a line of the access log says stands in fields of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as a line."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
        said: Mapping[str, object] = {"message": record.getMessage()}
        if isinstance(record.args, Mapping):
            said = record.args
        elif record.exc_info:
            said = {**said, "traceback": self.formatException(record.exc_info)}
        return json.dumps({**line, **said}, ensure_ascii=False, default=str)

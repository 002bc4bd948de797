"""Progress bars of transformers, which it draws into files too."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Meanwhile transformers draws no bars, unless standard error is a terminal."""
    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()

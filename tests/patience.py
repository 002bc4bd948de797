"""Waiting without a clock: no test may pass or fail by how busy the machine is."""

import asyncio

PATIENCE = 300.0
"""Seconds to wait for what has to happen. Only a test that fails waits so long."""


def skip(seconds: float) -> None:
    """Move the clock of the running event loop on: what was due by then is due now."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]

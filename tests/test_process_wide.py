"""Switches of the whole process."""

import gc
import os
import threading
from contextlib import ExitStack

from outpace.process_wide import COLLECTOR, environment
from tests.patience import PATIENCE


def test_environment_variables_are_set_for_a_while_and_only_who_sets_some_waits() -> None:
    before = os.environ.get("OUTPACE_A_TEST")
    with environment({"OUTPACE_A_TEST": "1"}):
        assert os.environ["OUTPACE_A_TEST"] == "1"

        def set_none() -> None:
            with environment({}):
                pass

        other = threading.Thread(target=set_none, daemon=True)
        other.start()
        other.join(PATIENCE)
        assert not other.is_alive()
    assert os.environ.get("OUTPACE_A_TEST") == before


def test_garbage_is_collected_again_when_the_last_thread_needs_it_no_longer() -> None:
    """They need not end in the opposite order: the first to begin may be the first to end."""
    assert gc.isenabled()
    first, second = ExitStack(), ExitStack()
    with second:
        with first:
            first.enter_context(COLLECTOR.off())
            second.enter_context(COLLECTOR.off())
        assert not gc.isenabled()
    assert gc.isenabled()

"""Switches of the whole process."""

import os
import threading

from outpace.process_wide import environment
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

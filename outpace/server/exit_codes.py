"""Exit codes of `outpace serve`."""

FINISHED = 0
"""Exit code: ended by a signal, and every request was answered."""
NOT_STARTED = 1
"""Exit code: the model or the port cannot be used; standard error says why in one line."""
WRONG_OPTION = 2
"""Exit code: an option has a value that cannot work; standard error says why in one line."""
CUT_OFF = 3
"""Exit code: ended by a signal, and requests were cut off."""
INTERRUPTED = 130
"""Exit code: interrupted before it served anything."""

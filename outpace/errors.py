"""The errors Outpace raises. Each says which field is wrong and what to do about it."""

from collections.abc import Iterator
from contextlib import contextmanager

NO_TOKENIZER = "put the tokenizer's files into the model's folder, or pass LLM(tokenizer=...)"
"""Remedy for text given to a model without a tokenizer."""


class OutpaceError(Exception):
    """Base of every error that Outpace raises on purpose."""


class ConfigError(OutpaceError, ValueError):
    """A configuration value, or a combination of them, cannot work."""


class InputError(OutpaceError, ValueError):
    """An argument of a call (shape, type, length, name) is wrong."""


class StateError(OutpaceError, RuntimeError):
    """A call that cannot work in this state: the engine is destroyed, or profiling is not turned on."""


class Overloaded(OutpaceError, RuntimeError):
    """The queue of waiting requests is full; the same call can work later."""


class EngineDead(OutpaceError, RuntimeError):
    """The engine failed or its process ended during the request; the same call can work later."""


class EngineUnavailable(EngineDead):
    """There is no engine at this moment, so the request was not started; the same call can work later."""


class ModelError(OutpaceError, ValueError):
    """A model, checkpoint or tokenizer cannot be loaded or used as asked."""


class DownloadError(OutpaceError, RuntimeError):
    """A download failed, or the file has a wrong checksum."""


class OffloadError(OutpaceError, RuntimeError):
    """Weights or pages in host memory or files could not be written or read, or have a wrong checksum."""


class NotSupported(OutpaceError, NotImplementedError):
    """Outpace does not support this."""


class NotSupportedYet(NotSupported):
    """A known field that this release does not support yet."""

    def __init__(self, field: str, capability: str) -> None:
        super().__init__(f"{field}: {capability} is not in this release yet; leave {field} at its default")
        self.field = field
        self.capability = capability


@contextmanager
def as_field(field: str, known_as: str = "model") -> Iterator[None]:
    """Make errors that begin with `known_as` begin with the name of the field that the caller gave."""
    try:
        yield
    except (ModelError, ConfigError, NotSupported) as error:
        start, _, rest = str(error).partition(": ")
        if start != known_as or field == known_as or isinstance(error, NotSupportedYet):
            raise
        raise type(error)(f"{field}: {rest}") from error

"""Checks finished answers against their whole schema, for keywords that no grammar can enforce."""

import json
from typing import Any, NoReturn

from outpace.errors import InputError, NotSupported
from outpace.structured.outputs import StructureCheck

MAX_BACKTRACKS = 10_000  # steps of one pattern in one string
MAX_PROBLEM = 300  # characters


class SchemaCheck:
    """Checks answers against one schema. Thread-safe."""

    def __init__(self, schema: str, later: tuple[str, ...], where: str) -> None:
        """InputError: the schema cannot be used. where: its field, for errors."""
        try:
            import jsonschema_rs
        except ImportError:
            raise NotSupported(f"{where}: jsonschema-rs is missing; pip install 'outpace[structured]'") from None
        self.later = later
        """Keywords that the grammar does not enforce, with their places."""
        try:
            self._validator: Any = jsonschema_rs.validator_for(
                json.loads(schema),
                validate_formats=False,
                retriever=_no_others,
                pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS),
            )
        except (ValueError, TypeError, jsonschema_rs.ReferencingError) as error:
            raise InputError(f"{where}: {_first_line(error)}") from None

    def __call__(self, text: str) -> StructureCheck:
        """The result for an answer."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return StructureCheck(self.later, "the answer is not JSON")
        try:
            error = next(iter(self._validator.iter_errors(value)), None)
        except (ValueError, RecursionError) as failed:  # nested too deep
            return StructureCheck(self.later, _first_line(failed))
        if error is None:
            return StructureCheck(self.later, None)
        place = ".".join(map(str, error.instance_path))
        return StructureCheck(self.later, f"{place + ': ' if place else ''}{error.message}"[:MAX_PROBLEM])


def _no_others(address: str) -> NoReturn:
    """References to other documents are not fetched."""
    raise ValueError(f"{address[:80]!r} is not in the schema, and nothing is fetched")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_PROBLEM]

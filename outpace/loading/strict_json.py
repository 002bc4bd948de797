"""Parses JSON of checkpoints strictly: no duplicate names, no NaN, limited size. Imports no torch."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Never

from outpace.errors import ModelError

_MAX_BYTES = 100_000_000


def parse(text: bytes) -> Any:
    """The value of a JSON text in UTF-8; all errors are ValueErrors."""
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
        if b"\\u" in text:
            json.dumps(found, ensure_ascii=False).encode("utf-8")  # raises for lone surrogates
        return found
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file. what: the expected kind of file, for the error."""
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES:,} bytes")
        found = parse(text)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {path} is not a {what} ({error}); check the file, or download it again") from error
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {twice[:200]!r} occurs twice")
    return found


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")

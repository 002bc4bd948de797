"""Reads and validates the entries of a quantization_config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.errors import ModelError


@dataclass(frozen=True)
class Settings:
    """A part of a quantization_config."""

    values: Mapping[str, Any]
    where: str = "quantization_config"

    def text(self, key: str, default: str | None = None) -> str:
        found = self._get(key, default)
        if not isinstance(found, str):
            raise self._wrong(key, found, "a string")
        return found

    def text_or(self, key: str, default: str) -> str:
        """A string; missing or null: the default, which may be empty."""
        return self.text(key, default) if self.values.get(key) is not None else default

    def flag(self, key: str, default: bool) -> bool:
        found = self._get(key, default)
        if not isinstance(found, bool):
            raise self._wrong(key, found, "true or false")
        return found

    def choice(self, key: str, known: Sequence[int], default: int | None = None) -> int:
        """One of these numbers; others are refused."""
        found = self._get(key, default)
        if isinstance(found, bool) or not isinstance(found, int):
            raise self._wrong(key, found, "a number")
        if found not in known:
            raise self.refuse(f"{key} {found}", f"use a checkpoint with {' or '.join(map(str, known))}")
        return found

    def group_size(self, key: str, default: int | None) -> int | None:
        """Columns that share a scale; None (-1 in the file): the whole row."""
        found = self._get(key, default)
        if isinstance(found, bool) or not isinstance(found, int) or (found < 1 and found != -1):
            raise self._wrong(key, found, "-1 or a number above 0")
        return None if found == -1 else found

    def pair(self, key: str) -> tuple[int, int] | None:
        found = self.values.get(key)
        if found is None:
            return None
        numbers = isinstance(found, list | tuple) and all(type(size) is int and size > 0 for size in found)
        if not numbers or len(found) != 2:
            raise self._wrong(key, found, "two numbers above 0")
        return found[0], found[1]

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object; missing or null: empty."""
        found = self.values.get(key)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            raise self._wrong(key, found, "an object")
        return found

    def part(self, key: str) -> "Settings":
        return Settings(self.mapping(key), f"{self.where}.{key}")

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; missing or null: empty."""
        found = self.values.get(key)
        if found is None:
            return ()
        if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
            raise self._wrong(key, found, "a list of strings")
        return tuple(found)

    def refuse(self, what: str, remedy: str) -> ModelError:
        """The error for a setting that is known but not supported."""
        return ModelError(f"model: {self.where}: {what} is not supported; {remedy}")

    def _get(self, key: str, default: Any) -> Any:
        found = self.values.get(key)
        if found is None and default is None:
            raise ModelError(f"model: {self.where}.{key} is missing; download the model's config.json again")
        return default if found is None else found

    def _wrong(self, key: str, found: object, wanted: str) -> ModelError:
        return ModelError(
            f"model: {self.where}.{key}: expected {wanted}, got {found!r:.60}; download the model's config.json again"
        )

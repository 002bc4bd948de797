"""Reads the text for evaluation or calibration: given, from a file, or the built-in one."""

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from outpace.errors import InputError

Text = str | os.PathLike[str] | Sequence[int] | None
"""Text, the path of a text file, token ids, or None for the built-in text."""


def built_in_text() -> str:
    """A few thousand words: stories, dialogue, instructions, code, numbers, tables."""
    return (files("outpace") / "quality" / "text.txt").read_text(encoding="utf-8")


def read_text(text: Text) -> tuple[str, str | Sequence[int]]:
    """(name of the source, the text or its token ids)."""
    if text is None:
        return "built-in text", built_in_text()
    if isinstance(text, str):
        return "given text", text
    if isinstance(text, os.PathLike):
        path = Path(text)
        return path.name, _read_file(path)
    return "given tokens", text


def _read_file(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"text: cannot read {path} ({error.strerror}); give a text file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"text: {path} is not UTF-8 text from byte {error.start} on; give a text file") from None
    if "\0" in text:
        raise InputError(f"text: {path} contains zero bytes and is not text; give a text file")
    return text

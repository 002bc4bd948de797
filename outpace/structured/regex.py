"""Regular expressions that can be kept to exactly: what xgrammar would pass over is refused."""

from itertools import pairwise

from outpace.errors import InputError

_CLASSES = frozenset("dDwWsS")
_CONTROL = frozenset("nrtfvxu0")
_DOT = r"[^\n\r]"
"""What a dot means: xgrammar's takes line ends, too."""


def checked_regex(pattern: str, where: str, *, in_json: bool = False) -> str:
    """The pattern as xgrammar understands it; what it would ignore or read differently is refused.

    in_json: of a string in JSON, whose escapes are not known.
    """
    place, inside, dots = 0, False, []
    while place < len(pattern):
        letter, rest = pattern[place], pattern[place + 1 : place + 5]
        if letter == "\\":
            _check_escape(rest[:1], where, in_json)
            place += 2
            continue
        if in_json and (letter == '"' or letter < " "):
            raise _refused(where, repr(letter), "JSON writes it in another way; leave it out")
        if inside:
            if letter == "[" and rest[:1] in (":", ".", "="):
                raise _refused(where, f"[{rest[:1]}", "name the characters")
            inside = letter != "]"
        elif letter == "[":
            inside = True
            place += rest.startswith("^")
        elif letter == "(" and rest.startswith("?") and not _plain_group(rest):
            raise _refused(where, f"({rest[:2]}", "of groups there are (...), (?:...) and (?<name>...)")
        elif letter == "^" and place > 0:
            raise _refused(where, "^", "it can stand at the beginning alone")
        elif letter == "$" and rest:
            raise _refused(where, "$", "it can stand at the end alone")
        elif letter == ".":
            dots.append(place)
        place += 1
    if in_json or not dots:
        return pattern
    pieces = [pattern[begin + 1 : end] for begin, end in pairwise((-1, *dots, len(pattern)))]
    return _DOT.join(pieces)


def _check_escape(letter: str, where: str, in_json: bool) -> None:
    if not letter:
        raise InputError(f"{where}: the regular expression ends with a backslash")
    known = letter in _CLASSES or (not in_json and letter in _CONTROL) or not letter.isalnum()
    if not known or (in_json and letter in '\\"'):
        raise _refused(where, f"\\{letter}", "name the characters")


def _plain_group(rest: str) -> bool:
    return rest.startswith("?:") or (rest.startswith("?<") and rest[2:3] not in ("=", "!"))


def _refused(where: str, what: str, remedy: str) -> InputError:
    return InputError(f"{where}: {what} in a regular expression is not supported here: {remedy}")

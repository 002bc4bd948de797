"""Regular expressions for the regex crate of Rust: rewritten where it differs from Python and JavaScript, refused where
it lacks a feature."""

import re

from outpace.errors import InputError

_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;=?@[\\]^_`{|}~")  # may be escaped in Rust; \< and \> are boundaries
_SET_OPERATORS = ("&&", "--", "~~")
_TOKEN = re.compile(r"\\.|\(\?<?[=!]|.", re.DOTALL)


def checked_regex(pattern: str, where: str) -> str:
    """The pattern for llguidance. InputError names an unsupported feature."""
    if (problem := not_regular(pattern)) is not None:
        raise InputError(f"{where}: {problem} in a regular expression is not supported here")
    return for_rust(pattern, where)


def not_regular(pattern: str) -> str | None:
    """The part of a pattern that needs backtracking: lookaround, word boundary or backreference."""
    inside = False
    for token in _TOKEN.findall(pattern):
        if token[0] == "\\":
            letter = token[1:]
            if not inside and (letter in ("b", "B", "k") or letter in tuple("123456789")):
                return token
        elif inside:
            inside = token != "]"
        elif token in _LOOKS:
            return token
        else:
            inside = token == "["
    return None


def for_rust(pattern: str, where: str) -> str:
    """The pattern with escapes for Rust, where classes may contain classes and set operators.

    InputError: unbalanced brackets, which could combine with the text that llguidance puts around a pattern.
    """
    made: list[str] = []
    place, inside, begun, depth = 0, False, False, 0  # begun: a class without a character yet
    while place < len(pattern):
        letter, pair = pattern[place], pattern[place : place + 2]
        if letter == "\\" and len(pair) == 2:
            made.append(pair if pair[1].isalnum() or pair[1] in _PUNCTUATION else pair[1])
            place, begun = place + 2, False
        elif not inside:
            depth += (letter == "(") - (letter == ")")
            if letter == "\\" or depth < 0:
                wrong = "ends with a \\" if letter == "\\" else "has a ) without a ("
                raise InputError(f"{where}: the regular expression {wrong}")
            made.append(letter)
            inside = begun = letter == "["
            place += 1
            if inside and pattern[place : place + 1] == "^":
                made.append("^")
                place += 1
        elif letter == "[" and pattern[place + 1 : place + 2] == ":":  # [:alpha:] is the same everywhere
            end = pattern.find(":]", place)
            stop = place + 1 if end < 0 else end + 2
            made.append(pattern[place:stop])
            place, begun = stop, False
        elif letter == "[" or pair in _SET_OPERATORS:
            made.append(f"\\{letter}")
            place, begun = place + 1, False
        else:
            made.append(letter)
            inside, begun = letter != "]" or begun, False
            place += 1
    if inside or depth:
        raise InputError(f"{where}: the regular expression has a {'[' if inside else '('} that is not closed")
    return "".join(made)

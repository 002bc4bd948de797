"""Regular expressions as the regex crate of Rust understands them: what it reads differently from Python and
JavaScript is written in another way, what it has not is refused."""

import re

from outpace.errors import InputError

_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;=?@[\\]^_`{|}~")  # may follow a backslash in Rust; < and > mean boundaries
_SET_OPERATORS = ("&&", "--", "~~")
_TOKEN = re.compile(r"\\.|\(\?<?[=!]|.", re.DOTALL)


def checked_regex(pattern: str, where: str) -> str:
    """The pattern for llguidance. InputError names what it cannot do."""
    if (problem := not_regular(pattern)) is not None:
        raise InputError(f"{where}: {problem} in a regular expression is not supported here")
    return for_rust(pattern, where)


def not_regular(pattern: str) -> str | None:
    """What in the pattern needs a backtracking matcher: a look around, a word boundary or a backreference."""
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
    """The same pattern: in Rust a class may hold classes and set operators, and some escapes mean something else.

    InputError: it is not a whole pattern. llguidance puts others around it, which would make it whole.
    """
    made: list[str] = []
    place, inside, begun, depth = 0, False, False, 0  # begun: a class that has no character yet
    while place < len(pattern):
        letter, pair = pattern[place], pattern[place : place + 2]
        if letter == "\\" and len(pair) == 2:
            made.append(pair if pair[1].isalnum() or pair[1] in _PUNCTUATION else pair[1])
            place, begun = place + 2, False
        elif not inside:
            depth += (letter == "(") - (letter == ")")
            if letter == "\\" or depth < 0:
                raise InputError(f"{where}: the regular expression has a {letter} that nothing belongs to")
            made.append(letter)
            inside = begun = letter == "["
            place += 1
            if inside and pattern[place : place + 1] == "^":
                made.append("^")
                place += 1
        elif letter == "[" and pattern[place + 1 : place + 2] == ":":  # [:alpha:] means the same to everybody
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

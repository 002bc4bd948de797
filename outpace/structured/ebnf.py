"""EBNF in the style of vLLM and llama.cpp, rewritten as the Lark that llguidance reads.

llguidance.gbnf_to_lark rejects escapes such as \\- and \\d, and alternatives on lines of their own.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from outpace.errors import InputError

MAX_DEPTH = 64  # nested parentheses
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<is>::=)|(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)|(?P<text>"(?:\\.|[^"\\\n])*")"""
    r"""|(?P<class>\[(?:\\.|[^\]\\])*\])|(?P<count>\{\s*\d{1,6}\s*(?:,\s*(?:\d{1,6})?\s*)?\})|(?P<sign>[()|*+?.])""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "b": "\b"}
_CLASSES = frozenset("dDwWsS")
Token = tuple[str, str]


def lark_of_ebnf(text: str, where: str) -> str:
    """A grammar with a rule called root. Rules without recursion become terminals, which match greedily. A grammar
    without any recursion becomes one regular expression, which is exact."""
    rules = _Reader(text, where).rules()
    if "root" not in rules:
        raise InputError(f"{where}: there is no rule called root")
    for name, rule in rules.items():
        for other in rule.uses:
            if other not in rules:
                raise InputError(f"{where}: the rule {name[:40]} uses {other[:40]!r}, which is not defined")
    regular = _regular(rules)
    names = {name: f"{'T' if name in regular else 'r'}{number}" for number, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    for name, rule in rules.items():
        body = "".join(names[part] if is_name else part for is_name, part in rule.parts)
        lines.append(f"{names[name]}: {body}")
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class _Rule:
    """A rule in Lark, with unresolved names of other rules."""

    parts: list[tuple[bool, str]] = field(default_factory=list)
    """(is it the name of a rule, text)."""

    @property
    def uses(self) -> set[str]:
        """The rules that it names."""
        return {part for is_name, part in self.parts if is_name}


def _regular(rules: dict[str, _Rule]) -> set[str]:
    """The rules without recursion."""
    waiting = {name: len(rule.uses) for name, rule in rules.items()}
    users: dict[str, list[str]] = {}
    for name, rule in rules.items():
        for other in rule.uses:
            users.setdefault(other, []).append(name)
    found: set[str] = set()
    ready = [name for name, count in waiting.items() if not count]
    while ready:
        name = ready.pop()
        found.add(name)
        for user in users.get(name, ()):
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return found


class _Reader:
    """Reads one grammar."""

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        self._tokens = list(self._read(text))

    def rules(self) -> dict[str, _Rule]:
        """All rules by name."""
        starts = [at for at, (kind, _) in enumerate(self._tokens) if kind == "is"]
        found: dict[str, _Rule] = {}
        if not starts or starts[0] != 1:
            raise InputError(f"{self._where}: expected rules: name ::= ...")
        for at, end in zip(starts, [*(next_at - 1 for next_at in starts[1:]), len(self._tokens)], strict=True):
            kind, name = self._tokens[at - 1]
            if kind != "name" or name in found:
                raise InputError(f"{self._where}: {name[:40]!r} before ::= is not the name of a new rule")
            found[name] = self._rule(self._tokens[at + 1 : end])
        return found

    def _read(self, text: str) -> Iterator[Token]:
        place = 0
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                line = text.count("\n", 0, place) + 1
                raise InputError(f"{self._where}: {text[place]!r} in line {line} does not belong to EBNF")
            if match.lastgroup != "space":
                yield str(match.lastgroup), match[0]
            place = match.end()

    def _rule(self, tokens: list[Token]) -> _Rule:
        rule, depth, empty = _Rule(), 0, True  # empty: the current alternative

        def add(text: str, is_name: bool = False) -> None:
            rule.parts.append((is_name, text))

        for kind, text in tokens:
            if kind == "sign" and text in "|)":
                if empty:
                    add('""')
                depth -= text == ")"
                add(f" {text} ")
                empty = text == "|"
            elif text == "(":
                depth += 1
                add(" (")
                empty = True
            elif kind == "count" or text in ("*", "+", "?"):
                if empty:
                    raise InputError(f"{self._where}: {text} has nothing before it to repeat")
                add("".join(text.split()))
            else:
                add(" ")
                add(*self._atom(kind, text))
                empty = False
            if not 0 <= depth <= MAX_DEPTH:
                raise InputError(f"{self._where}: parentheses that do not match, or more than {MAX_DEPTH} deep")
        if empty:
            add(' ""')
        if depth:
            raise InputError(f"{self._where}: a parenthesis is not closed")
        return rule

    def _atom(self, kind: str, text: str) -> tuple[str, bool]:
        if kind == "name":
            return text, True
        if kind == "text":
            return json.dumps("".join(each for each, _ in self._characters(text[1:-1])), ensure_ascii=False), False
        if kind == "class":
            return f"/{self._class(text[1:-1])}/", False
        return "/(?s:.)/", False  # a dot

    def _class(self, text: str) -> str:
        """A class with each character as its number, so that no escapes are needed."""
        negated = text.startswith("^")
        letters = list(self._characters(text[negated:]))
        if not letters:
            raise InputError(f"{self._where}: [] holds no character")
        made, place = [], 0
        while place < len(letters):
            letter = letters[place][0]
            if len(letter) == 2:  # a class such as \d
                made.append(letter)
            elif letters[place + 1 : place + 2] == [("-", True)] and place + 2 < len(letters):
                made.append(f"{_numbered(letter)}-{_numbered(letters[place + 2][0])}")
                place += 2
            else:
                made.append(_numbered(letter))
            place += 1
        return f"[{'^' if negated else ''}{''.join(made)}]"

    def _characters(self, text: str) -> Iterator[tuple[str, bool]]:
        """The characters of a string or a class, and whether each is unescaped."""
        for match in _ESCAPE.finditer(text):
            byte, short, long, letter, plain = match.groups()
            if plain is not None:
                yield plain, True
            elif letter is None:
                yield self._numbered(int(byte or short or long, 16)), False
            elif letter in _CLASSES:
                yield f"\\{letter}", False
            elif letter in _LETTERS or not letter.isalnum():
                yield _LETTERS.get(letter, letter), False
            else:
                raise InputError(f"{self._where}: \\{letter} is not an escape of EBNF")

    def _numbered(self, number: int) -> str:
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise InputError(f"{self._where}: {number:#x} is not a character")
        return chr(number)


def _numbered(letter: str) -> str:
    return f"\\x{{{ord(letter[-1]):x}}}"

"""Reads the fields of a body that decide which replica gets it. Wrong bodies are refused by the replica."""

import hashlib
from collections.abc import Iterable

import msgspec

from outpace.replicas.choose import LEVELS, Wanted, cost_of

_NOTHING = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    """The fields that matter here; others are skipped. Prompts stay JSON."""

    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    prompts: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_new_tokens: int | None = None
    n: int | None = None


def read(body: bytes, caller: bytes = b"") -> tuple[Wanted, str | None]:
    """What is known of a request, and its user. caller: bytes that are part of the hashes of prefixes."""
    try:
        found = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Wanted(cost_of(len(body), None)), None
    text = next((each for each in map(bytes, (found.messages, found.prompt, found.prompts, found.input)) if each), b"")
    salt = found.cache_salt or found.prompt_cache_key or ""
    apart = _hashed((caller, salt.encode("utf-8", "surrogatepass"), bytes(found.tools)))
    limits = (found.max_completion_tokens, found.max_tokens, found.max_new_tokens)
    most = 0 if found.input else next((each for each in limits if each is not None), None)
    return Wanted(cost_of(len(body), most, found.n or 1), _prefixes(text, apart)), found.user


def _prefixes(text: bytes, apart: bytes) -> tuple[bytes, ...]:
    return tuple(
        hashlib.blake2b(text[:level], digest_size=16, key=apart).digest() for level in LEVELS if level <= len(text)
    )


def _hashed(parts: Iterable[bytes]) -> bytes:
    """One hash of several parts; their lengths are hashed too, so that different parts never look alike."""
    whole = hashlib.blake2b(digest_size=32)
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.digest()

"""What a request will cost a replica, guessed from its body before anybody has read the rest of it."""

import msgspec

ANSWER = 256  # tokens, where a request does not say
LONGEST = 4096  # tokens that are counted at most: few answers are as long as they may be
MOST_ANSWERS = 128
LEAST = 16.0  # of any request
PROMPT = 1 / 16  # of a byte: a token of four bytes costs a quarter of one that is generated


class _Asked(msgspec.Struct):
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    n: int | None = None


def cost_of(body: bytes) -> float:
    """The cost in tokens that are generated. What is wrong with a body the replica says."""
    try:
        asked = msgspec.json.decode(body, type=_Asked) if body else _Asked(max_tokens=0)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        asked = _Asked(max_tokens=0)
    tokens = next((each for each in (asked.max_completion_tokens, asked.max_tokens) if each is not None), ANSWER)
    answers = max(1, min(asked.n or 1, MOST_ANSWERS))
    return LEAST + PROMPT * len(body) + max(0, min(tokens, LONGEST)) * answers

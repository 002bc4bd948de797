"""The measured requests: drawn from a seed, so that they are the same everywhere, or read from a file."""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from outpace.errors import InputError

SEED = 1234
COUNT = 256
PROMPT_LENGTHS = (64, 1024)
OUTPUT_LENGTHS = (64, 512)
FIRST_ID, END_ID = 10, 32000  # range of the token ids; special tokens often come before it

CHAT_PROMPT, CHAT_OUTPUT = 220, 200  # mean tokens of a turn of ShareGPT
CHAT_SPREAD = 1.0  # standard deviation of the logarithm
CHAT_SHORTEST, CHAT_LONGEST = 4, 1024
FILE_OUTPUT = 128  # default number of new tokens for entries of a file


class Item(NamedTuple):
    """One request."""

    prompt: list[int]
    """Token ids."""
    output_len: int
    """New tokens."""


Draw = Callable[[int, int], list[Item]]
"""Makes that many requests from a seed."""
Tokenize = Callable[[str], list[int]]


class Source(NamedTuple):
    """Where requests come from."""

    draw: Draw
    """Requests that are measured."""
    warm_up: Draw
    """Requests for the warm-up with the same seed: of the same kind, with other prompts."""


@dataclass(frozen=True)
class Workload:
    """The kind of requests; by default their lengths are drawn uniformly."""

    input_len: int | None = None
    output_len: int | None = None
    chat: bool = False
    dataset: Path | None = None

    def __post_init__(self) -> None:
        check_least(1, input_len=self.input_len, output_len=self.output_len)
        if self.chat and (self.input_len or self.output_len or self.dataset):
            raise InputError("workload: sharegpt draws its own lengths; remove input-len, output-len and dataset")
        if self.dataset is not None and self.input_len is not None:
            raise InputError("input-len: the prompts of dataset have their own lengths; remove one of the two")
        if self.dataset is None and (self.input_len is None) != (self.output_len is None):
            raise InputError("input-len: fixed lengths need both input-len and output-len")

    def describe(self) -> str:
        """In words."""
        if self.dataset is not None:
            return self.dataset.name
        if self.chat:
            return f"lengths like ShareGPT's (means {CHAT_PROMPT} and {CHAT_OUTPUT})"
        if self.input_len:
            return f"{self.input_len} prompt and {self.output_len} new tokens"
        return "prompts of {}..{}, outputs of {}..{} tokens".format(*PROMPT_LENGTHS, *OUTPUT_LENGTHS)

    def source(self, vocab: int, tokenize: Tokenize, max_model_len: int) -> Source:
        """The requests for a model with this vocabulary and length."""
        if self.dataset is not None:
            items = read_dataset(self.dataset, tokenize, max_model_len, self.output_len)
            return Source(
                lambda count, seed: choose(items, count, seed),
                lambda count, seed: like(choose(items, count, seed), vocab, seed + 1),
            )

        def draw(count: int, seed: int) -> list[Item]:
            if self.chat:
                return chat_like(vocab, count, seed, max_model_len)
            if self.input_len and self.output_len:
                prompt, output = (self.input_len, self.input_len), (self.output_len, self.output_len)
                return uniform(vocab, count, seed, prompt=prompt, output=output)
            return uniform(vocab, count, seed)

        return Source(draw, lambda count, seed: draw(count, seed + 1))


def check_least(least: int, **values: int | None) -> None:
    """Raise if an option is too small."""
    for name, value in values.items():
        if value is not None and value < least:
            raise InputError(f"{name.replace('_', '-')}: must be at least {least}, got {value}")


def random_ids(seed: int, length: int, vocab: int) -> list[int]:
    """Token ids of a prompt."""
    draw, end = random.Random(seed), min(vocab, END_ID)
    return [draw.randrange(FIRST_ID, end) for _ in range(length)]


def latency_prompt(vocab: int, length: int = 128, number: int = 0) -> list[int]:
    """The prompt whose latency is measured; `number` gives others for a batch."""
    return random_ids(SEED * 7919 + number, length, vocab)


def uniform(
    vocab: int,
    count: int = COUNT,
    seed: int = SEED,
    *,
    prompt: tuple[int, int] = PROMPT_LENGTHS,
    output: tuple[int, int] = OUTPUT_LENGTHS,
) -> list[Item]:
    """Requests with uniformly drawn lengths, ends included."""
    draw = random.Random(seed)
    return _of_lengths([(draw.randint(*prompt), draw.randint(*output)) for _ in range(count)], vocab, seed)


def chat_like(vocab: int, count: int, seed: int = SEED, max_model_len: int = 2 * CHAT_LONGEST) -> list[Item]:
    """Requests with the skewed lengths of conversations: log-normal, clipped at both ends."""
    draw, longest = random.Random(seed), min(CHAT_LONGEST, max_model_len // 2)

    def length(mean: int) -> int:
        drawn = draw.lognormvariate(math.log(mean) - CHAT_SPREAD**2 / 2, CHAT_SPREAD)
        return max(min(CHAT_SHORTEST, longest), min(longest, round(drawn)))

    return _of_lengths([(length(CHAT_PROMPT), length(CHAT_OUTPUT)) for _ in range(count)], vocab, seed)


def like(items: Sequence[Item], vocab: int, seed: int) -> list[Item]:
    """Requests of the same lengths with other tokens."""
    return _of_lengths([(len(item.prompt), item.output_len) for item in items], vocab, seed)


def check_lengths(items: Sequence[Item], max_model_len: int) -> None:
    """Raise if a request is too long for the model, before anything runs."""
    longest = max(len(item.prompt) + item.output_len for item in items)
    if longest > max_model_len:
        raise InputError(
            f"max-model-len: the longest request has {longest} tokens, and the model was started for {max_model_len}; "
            "raise it, or ask for shorter requests (input-len, output-len)"
        )


def choose(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """`count` of the requests, in an order that depends on the seed."""
    if count > len(items):
        raise InputError(f"num-prompts: {count} is more than the {len(items)} usable requests of the dataset")
    return random.Random(seed).sample(items, count)


def read_dataset(path: Path, tokenize: Tokenize, max_model_len: int, output_len: int | None) -> list[Item]:
    """ShareGPT's JSON, or JSON lines with "prompt" and perhaps "output_len"; requests that are too long are skipped."""
    items = []
    for number, entry in enumerate(_entries(path), 1):
        found = _item(f"{path.name}, entry {number}", entry, tokenize, output_len)
        if found is not None and found.prompt and len(found.prompt) + found.output_len <= max_model_len:
            items.append(found)
    if not items:
        raise InputError(f"dataset: {path} has no request that fits {max_model_len} tokens")
    return items


def _of_lengths(lengths: Sequence[tuple[int, int]], vocab: int, seed: int) -> list[Item]:
    return [Item(random_ids(seed * 100003 + i, prompt, vocab), output) for i, (prompt, output) in enumerate(lengths)]


def _entries(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"dataset: cannot read {path} ({error}); name a JSON or JSON lines file") from None
    try:
        if text.lstrip().startswith("["):
            yield from json.loads(text)
        else:
            yield from (json.loads(line) for line in text.splitlines() if line.strip())
    except json.JSONDecodeError as error:
        raise InputError(f"dataset: {path} is neither JSON nor JSON lines ({error})") from None


def _item(where: str, entry: Any, tokenize: Tokenize, output_len: int | None) -> Item | None:
    """The request of an entry; None: it is a conversation without an answer."""
    if not isinstance(entry, dict):
        raise InputError(f"dataset: {where}: expected an object, got {entry!r:.60}")
    if "conversations" in entry:
        return _of_conversation(where, entry["conversations"], tokenize, output_len)
    prompt, length = entry.get("prompt"), entry.get("output_len", output_len or FILE_OUTPUT)
    if isinstance(prompt, str):
        prompt = tokenize(prompt)
    if not isinstance(prompt, list) or type(length) is not int or length < 1:
        raise InputError(
            f'dataset: {where}: expected "prompt" (text or token ids) and perhaps "output_len" (a number >= 1), '
            f'or ShareGPT\'s "conversations"; got {entry!r:.80}'
        )
    return Item(prompt, length)


def _of_conversation(where: str, turns: Any, tokenize: Tokenize, output_len: int | None) -> Item | None:
    """The first turn is the prompt, and the second gives the length of the answer."""
    try:
        texts = [turn["value"] for turn in turns[:2]]
    except (TypeError, KeyError):
        raise InputError(f'dataset: {where}: expected turns with a "value", got {turns!r:.80}') from None
    if len(texts) < 2:
        return None
    return Item(tokenize(texts[0]), output_len or max(1, len(tokenize(texts[1]))))

"""`LLM`'s engine over the ranks of a world that runs already: many models in one start, steps told by the store."""

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from outpace import LLM, SamplingParams
from outpace.config import LLMConfig
from outpace.llm_engine import LLMEngine
from outpace.load_paged import load_paged
from outpace.ranks.leader import Ranks
from outpace.ranks.messages import Launch
from outpace.ranks.steps import launch_of
from outpace.runner.start import start_runner
from outpace.types import Step

Found = TypeVar("Found")
RESET, END = b"reset", b"end"
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [11, 12, 13], [5, 6, 7, 8, 9, 10, 12, 13, 14]]
PARAMS = (
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, seed=3, max_tokens=8, ignore_eos=True, logprobs=1),
)
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "num_blocks": 5, "max_model_len": 32}
"""Few pages, so that requests give way."""


class Board:
    """What the first rank says to all others, in order; it waits for none of them."""

    def __init__(self) -> None:
        name: list[Any] = [secrets.token_hex(8)]
        dist.broadcast_object_list(name)
        self._keys = (f"{name[0]} {number}" for number in itertools.count())
        self._store = dist.distributed_c10d._get_default_store()

    def say(self, data: bytes) -> None:
        """On the first rank."""
        self._store.set(next(self._keys), data)  # type: ignore[arg-type]

    def hear(self) -> bytes:
        """On the others: what is next."""
        return bytes(self._store.get(next(self._keys)))


class Told(Ranks):
    """The others are there, and read what they do."""

    def __init__(self, config: LLMConfig, board: Board) -> None:
        super().__init__(config)
        self._board = board

    def launch(self, step: Step, *, for_logits: bool = False) -> None:
        """See `Ranks`."""
        self._board.say(msgspec.msgpack.encode(launch_of(step, for_logits=for_logits)))

    def reset(self) -> None:
        """See `Ranks`."""
        self._board.say(RESET)

    def close(self, cause: str | None = None) -> None:
        """The world goes on."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """See `Ranks`."""
        yield


def over_ranks(folder: Path, options: dict[str, Any], ask: Callable[[LLMEngine], Found]) -> Found | None:
    """What is asked of the engine, on the first rank; the others run its steps, and answer nothing."""
    config, board = LLMConfig.of({**SMALL, **options}), Board()
    parts = load_paged(folder, config, tokenizer=False)
    if dist.get_rank() == 0:
        engine = LLMEngine(parts, ranks=Told(config, board))
        try:
            return ask(engine)
        finally:
            board.say(END)
    runner = start_runner(parts.model, parts.config, parts.max_model_len).runner
    decode = msgspec.msgpack.Decoder(Launch)
    while (data := board.hear()) != END:
        if data == RESET:
            runner.reset()
        else:
            runner.launch(decode.decode(data).step())
    return None


def tokens_over_ranks(folder: Path, options: dict[str, Any]) -> list[list[int]] | None:
    """What the engine answers to a few prompts, on the first rank."""
    return over_ranks(folder, options, _answers)


def _answers(engine: LLMEngine) -> list[list[int]]:
    outputs = [
        engine.add_request(f"{kind}-{number}", prompt, params)
        for kind, params in enumerate(PARAMS)
        for number, prompt in enumerate(PROMPTS)
    ]
    while engine.has_unfinished_requests:
        engine.step()
    return [list(output.outputs[0].token_ids) for output in outputs]


def tokens_alone(folder: Path, options: dict[str, Any] | None = None) -> list[list[int]]:
    """The same of one rank."""
    with LLM(folder, **{**SMALL, **(options or {})}) as llm:
        answers = [llm.generate(list(PROMPTS), params, use_tqdm=False) for params in PARAMS]
    return [list(each.outputs[0].token_ids) for some in answers for each in some]

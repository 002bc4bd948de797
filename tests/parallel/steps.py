"""`LLM`'s engine over the ranks of a world that runs already: many models in one start, steps told by a collective."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from outpace import LLM, SamplingParams
from outpace.config import LLMConfig
from outpace.llm_engine import LLMEngine
from outpace.prepare import load_paged
from outpace.ranks.leader import Ranks
from outpace.ranks.messages import Launch
from outpace.ranks.steps import launch_of
from outpace.runner.start import start_runner
from outpace.types import Step

Found = TypeVar("Found")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [11, 12, 13], [5, 6, 7, 8, 9, 10, 12, 13, 14]]
PARAMS = (
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, seed=3, max_tokens=8, ignore_eos=True, logprobs=1),
)
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "num_blocks": 5, "max_model_len": 32}
"""Few pages, so that requests give way."""


class Told(Ranks):
    """The others are there, and hear of steps by a broadcast."""

    def launch(self, step: Step, *, for_logits: bool = False) -> None:
        """See `Ranks`."""
        _tell(msgspec.msgpack.encode(launch_of(step, for_logits=for_logits)))

    def reset(self) -> None:
        """See `Ranks`."""
        _tell(b"")

    def close(self, cause: str | None = None) -> None:
        """The world goes on."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """See `Ranks`."""
        yield


def _tell(data: bytes | None) -> bytes | None:
    found: list[Any] = [data]
    dist.broadcast_object_list(found)
    answer: bytes | None = found[0]
    return answer


def over_ranks(folder: Path, options: dict[str, Any], ask: Callable[[LLMEngine], Found]) -> Found | None:
    """What is asked of the engine, on the first rank; the others run its steps, and answer nothing."""
    config = LLMConfig.of({**SMALL, **options})
    parts = load_paged(folder, config, tokenizer=False)
    if dist.get_rank() == 0:
        engine = LLMEngine(parts, ranks=Told(config))
        try:
            return ask(engine)
        finally:
            _tell(None)
    runner = start_runner(parts.model, parts.config, parts.max_model_len).runner
    decode = msgspec.msgpack.Decoder(Launch)
    while (data := _tell(None)) is not None:
        if data:
            runner.launch(decode.decode(data).step())
        else:
            runner.reset()
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


def tokens_alone(folder: Path) -> list[list[int]]:
    """The same of one rank."""
    with LLM(folder, **SMALL) as llm:
        answers = [llm.generate(list(PROMPTS), params, use_tqdm=False) for params in PARAMS]
    return [list(each.outputs[0].token_ids) for some in answers for each in some]

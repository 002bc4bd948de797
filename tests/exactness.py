"""The many requests, and the answers of Hugging Face, that several test files compare."""

import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from outpace import RequestOutput, SamplingParams
from outpace.llm_engine import LLMEngine
from outpace.types import Preemption, Step, Way
from tests.inject.families import made
from tests.inject.level0 import MIXED
from tests.inject.mixtures import mixture
from tests.models import VOCAB, tiny

BLOCK = 16
POSITIONS = 512
LONGEST = 300
SHORTER = 60  # the longest prompt where steps are so small that 300 tokens take too many of them
MOST_NEW = 24
END = 11  # the models' end-of-sequence token: some answers come to it, others do not
SWAP = 0.002  # GiB: more than these models can fill
LEVEL_0 = "olmo3"
LONG: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": POSITIONS},
    "qwen3": {"max_position_embeddings": POSITIONS},
    "gemma3": {"max_position_embeddings": POSITIONS, "sliding_window": 20},
    "gpt2": {"n_positions": POSITIONS},
    "opt": {"max_position_embeddings": POSITIONS},
    "bloom": {},
    "mixtral": {"max_position_embeddings": POSITIONS},
}
EXPERTS = {"gpt-oss": "gpt-oss yarn, full first", "dots1": "dots1"}


def model(family: str) -> Any:
    if family == LEVEL_0:
        return made("Olmo3", {**MIXED, "max_position_embeddings": POSITIONS, "eos_token_id": END})
    if family in EXPERTS:
        return mixture(EXPERTS[family], max_position_embeddings=POSITIONS, eos_token_id=END)
    return tiny(family, eos_token_id=END, **LONG[family])


@dataclass(frozen=True)
class Work:
    """Prompts with the number of tokens that each wants."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_blocks(self) -> int:
        """Blocks that all of them would take at once."""
        return sum(-(-(len(p) + n) // BLOCK) for p, n in zip(self.prompts, self.max_tokens, strict=True))

    def only(self, indices: Sequence[int]) -> "Work":
        return Work([self.prompts[index] for index in indices], [self.max_tokens[index] for index in indices])


@functools.cache
def work(longest: int) -> Work:
    """64 prompts: most are short, some are long, and every third begins like others, for one to three blocks."""
    rng = random.Random(0)
    lengths = [1, longest, *(round(longest ** rng.random()) for _ in range(62))]
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    common = [[rng.randrange(3, VOCAB) for _ in range(3 * BLOCK)] for _ in range(2)]
    for index in range(2, 64, 3):
        shared = rng.choice(common)[: BLOCK * rng.randint(1, 3)]
        prompts[index] = (shared + prompts[index])[:longest]
    return Work(prompts, [1, MOST_NEW, *(rng.randint(1, MOST_NEW) for _ in range(62))])


def hugging_face(reference: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Its greedy answer to one prompt alone."""
    ids = torch.tensor([list(prompt)])
    found = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return [int(token) for token in found[0, len(prompt) :]]


@functools.cache
def expected(family: str, longest: int) -> list[list[int]]:
    """The answers of plain Hugging Face, one by one."""
    plain, asked = model(family), work(longest)
    return [hugging_face(plain, *each) for each in zip(asked.prompts, asked.max_tokens, strict=True)]


@dataclass
class Seen:
    """What the scheduler did."""

    preempted: Counter[Preemption] = field(default_factory=Counter)
    cached_tokens: int = 0
    chunks: Counter[int] = field(default_factory=Counter)
    most_sequences: int = 0
    _loaded: set[int] = field(default_factory=set)

    def add(self, step: Step) -> None:
        self.preempted.update(step.preempted.values())
        self._loaded.update(block for copy in step.copies if copy.way is Way.LOAD for _, block in copy.pairs)
        for entry in step.sequences:
            self.chunks[entry.num_new_tokens] += 1
            if entry.request is not None and not self._loaded & set(entry.new_blocks):
                self.cached_tokens += entry.start
            if entry.request is not None:
                self._loaded -= set(entry.new_blocks)
        self.most_sequences = max(self.most_sequences, len(step.sequences))


@contextmanager
def watched(engine: LLMEngine) -> Iterator[Seen]:
    """Looks at every step that is scheduled."""
    seen, schedule = Seen(), engine.scheduler.schedule

    def scheduled() -> Step:
        step = schedule()
        seen.add(step)
        engine.scheduler.assert_consistent()
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", scheduled)
        yield seen


def served(engine: LLMEngine, asked: Work, seed: int) -> list[RequestOutput]:
    """Run requests that arrive at random moments."""
    rng, outputs = random.Random(seed), list[RequestOutput]()
    while len(outputs) < len(asked.prompts) or engine.has_unfinished_requests:
        for _ in range(rng.choice((0, 1, 2, 5, 9))):
            if (index := len(outputs)) < len(asked.prompts):
                params = SamplingParams(temperature=0, max_tokens=asked.max_tokens[index])
                outputs.append(engine.add_request(str(index), asked.prompts[index], params))
        engine.step()
    return outputs


def assert_same(outputs: Sequence[RequestOutput], answers: Sequence[Sequence[int]]) -> None:
    assert len(outputs) == len(answers)
    assert all(output.finished for output in outputs)
    assert [output.outputs[0].token_ids for output in outputs] == list(answers)

"""Many requests at once give the tokens that plain Hugging Face gives one by one, whatever the runtime does."""

import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outpace import LLM, RequestOutput, SamplingParams
from outpace.llm_engine import LLMEngine
from outpace.types import Preemption, Step, Way
from tests.inject.test_level0 import MIXED, made
from tests.inject.test_moe import made as mixture
from tests.inject.test_real import QUESTIONS
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


@dataclass(frozen=True)
class Case:
    """How the runtime is set up. Pools: roomy; small, so that requests give way and are computed again, or swapped."""

    chunk: int
    pool: str
    prefix_caching: bool
    ahead: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return LONGEST if self.chunk > 7 else SHORTER

    def options(self) -> dict[str, Any]:
        tokens = self.chunk if self.chunk > 1 else 8
        return {
            "device": "cpu",
            "block_size": BLOCK,
            "num_blocks": 800 if self.pool == "roomy" else -(-(self.longest + MOST_NEW) // BLOCK),
            "swap_space": SWAP if self.pool == "swap" else 0.0,
            "max_num_batched_tokens": tokens,
            "max_num_seqs": min(tokens, 16),
            "max_chunk_beside_decodes": self.chunk,
            "enable_prefix_caching": self.prefix_caching,
            "async_scheduling": self.ahead,
        }

    def __str__(self) -> str:
        caching, ahead = "cached" if self.prefix_caching else "uncached", "ahead" if self.ahead else "in-turn"
        return f"{self.chunk}-{self.pool}-{caching}-{ahead}"


# Every pair of (family, pool), (chunk, pool), (chunk, caching), (chunk, ahead), (pool, caching), (pool, ahead),
# (family, caching), (family, ahead) and (caching, ahead) is among these.
CASES: dict[str, list[Case]] = {
    "llama": [
        Case(512, "roomy", True, True),
        Case(64, "recompute", True, False),
        Case(7, "swap", False, True),
        Case(1, "recompute", False, True),
    ],
    "qwen3": [Case(64, "roomy", True, True), Case(7, "recompute", True, True), Case(512, "swap", False, False)],
    "gemma3": [Case(1, "roomy", True, False), Case(64, "recompute", False, True), Case(64, "swap", True, True)],
    "gpt2": [Case(7, "roomy", False, False), Case(512, "recompute", True, True), Case(1, "swap", True, True)],
    "opt": [Case(512, "roomy", False, False), Case(64, "recompute", False, True), Case(512, "swap", True, True)],
    "bloom": [Case(64, "roomy", False, True), Case(512, "recompute", True, False), Case(64, "swap", True, False)],
    "mixtral": [Case(512, "roomy", True, True), Case(64, "recompute", True, False), Case(64, "swap", False, True)],
    "gpt-oss": [Case(64, "recompute", True, True)],
    "dots1": [Case(64, "swap", True, False)],
    LEVEL_0: [Case(512, "roomy", True, False), Case(64, "recompute", True, True), Case(64, "swap", False, True)],
}


@pytest.mark.parametrize(
    ("family", "case"), [pytest.param(name, case, id=f"{name}-{case}") for name in CASES for case in CASES[name]]
)
def test_64_requests_that_come_and_go_get_the_tokens_of_hugging_face(family: str, case: Case) -> None:
    llm = LLM(model(family), **case.options())
    with watched(llm.engine) as seen:
        outputs = served(llm.engine, work(case.longest), seed=case.chunk)
    assert_same(outputs, expected(family, case.longest))
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_blocks
    kind = {"recompute": Preemption.RECOMPUTE, "swap": Preemption.SWAP}.get(case.pool)
    assert set(seen.preempted) == ({kind} if kind else set())
    assert (seen.cached_tokens > 0) == case.prefix_caching
    assert max(seen.chunks) <= max(case.chunk, 8)
    assert seen.most_sequences > 2


def test_the_answers_end_in_both_ways_and_differ() -> None:
    ends = [answer[-1] == END for name in LONG for answer in expected(name, LONGEST)]
    assert 0.05 < sum(ends) / len(ends) < 0.95, "the tests above see only one way to end"
    assert len({tuple(answer) for answer in expected("llama", LONGEST)}) > 50, "the answers are all alike"


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in turn"])
def test_one_token_a_step(ahead: bool) -> None:
    llm = LLM(
        model("llama"), device="cpu", block_size=BLOCK, num_blocks=8, max_num_batched_tokens=1, max_num_seqs=1,
        async_scheduling=ahead,
    )  # fmt: skip
    short = [index for index, prompt in enumerate(work(SHORTER).prompts) if len(prompt) < 30][:12]
    with watched(llm.engine) as seen:
        outputs = served(llm.engine, work(SHORTER).only(short), seed=1)
    assert_same(outputs, [expected("llama", SHORTER)[index] for index in short])
    assert set(seen.chunks) == {1}
    assert seen.most_sequences == 1


@pytest.mark.parametrize("swap_space", [0.0, SWAP], ids=["recompute", "swap"])
def test_ten_times_as_many_keys_and_values_as_there_are_pages(swap_space: float) -> None:
    asked = work(LONGEST)
    num_blocks = -(-(LONGEST + MOST_NEW) // BLOCK)
    assert asked.num_blocks >= 10 * num_blocks
    llm = LLM(
        model("llama"), device="cpu", block_size=BLOCK, num_blocks=num_blocks, swap_space=swap_space, max_num_seqs=64
    )
    params = [SamplingParams(temperature=0, max_tokens=count) for count in asked.max_tokens]
    with watched(llm.engine) as seen:
        outputs = llm.generate(asked.prompts, params, use_tqdm=False)
    assert_same(outputs, expected("llama", LONGEST))
    assert sum(seen.preempted.values()) > 0


@pytest.mark.real
def test_ten_chats_with_the_default_model(default_model_folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(default_model_folder)
    plain: Any = AutoModelForCausalLM.from_pretrained(default_model_folder, dtype=torch.float32)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    answers = [hugging_face(plain, prompt, 32) for prompt in prompts]
    with LLM(default_model_folder, device="cpu", dtype="fp32") as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert_same(outputs, answers)
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    assert [output.outputs[0].text for output in outputs] == texts

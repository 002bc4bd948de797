"""Many requests at once give the tokens that plain Hugging Face gives one by one, whatever the runtime does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outpace import LLM, SamplingParams
from outpace.types import Preemption
from tests.exactness import (
    BLOCK,
    END,
    LEVEL_0,
    LONG,
    LONGEST,
    MOST_NEW,
    SHORTER,
    SWAP,
    assert_same,
    expected,
    hugging_face,
    model,
    served,
    watched,
    work,
)
from tests.texts import QUESTIONS


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

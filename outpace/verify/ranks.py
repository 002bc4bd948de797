"""Checks that several ranks compute the same as one: runs the same prompts through `LLM` on one rank and on all."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from outpace.llm import LLM
from outpace.loading.dtypes import short
from outpace.types import RequestOutput, SamplingParams
from outpace.verify.compare import first_difference
from outpace.verify.prompts import LENGTHS, NEW_TOKENS, excerpts, text_tokens

ALLOWED = {torch.float32: 1e-3}
ALLOWED_16_BITS = 0.3  # a logit of 30 has steps of 0.25 in bf16
SHOWN = 5  # likeliest tokens whose log-probabilities are compared


@dataclass(frozen=True)
class RanksReport:
    """The result of `verify_ranks`."""

    model: str
    dtype: str
    device: str
    ranks: int
    lengths: tuple[int, ...]
    """Tokens of each prompt."""
    error: float
    """The largest difference of a log-probability, of the prompts' tokens and the likeliest ones at each position."""
    allowed: float
    new_tokens: int
    """Of each prompt, chosen greedily."""
    first_difference: tuple[int, int] | None
    """Prompt and new token, both counted from 0, where several ranks first differ from one."""
    tokens_count: bool
    """Whether greedy tokens must be equal; not in 16 bits, where rounding may decide between two tokens."""

    @property
    def passed(self) -> bool:
        """Whether several ranks compute the same as one."""
        return self.error <= self.allowed and (self.first_difference is None or not self.tokens_count)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {"passed": self.passed, **asdict(self)}


def verify_ranks(
    model: str | os.PathLike[str] | None,
    ranks: int,
    *,
    progress: Callable[[str], None] = lambda step: None,
    **options: Any,
) -> RanksReport:
    """Compare a model on one rank with itself on several. Options are those of LLM."""
    given = {name: value for name, value in options.items() if value is not None}
    progress("one rank")
    with LLM(model, max_num_seqs=8, **given) as llm:
        prompts = _prompts(llm)
        wanted, name, dtype, device = _run(llm, prompts), llm.name, llm.dtype, str(llm.device)
    progress(f"{ranks} ranks")
    with LLM(model, max_num_seqs=8, tensor_parallel_size=ranks, **given) as llm:
        found = _run(llm, prompts)
    return RanksReport(
        model=name,
        dtype=short(dtype),
        device=device.partition(":")[0],
        ranks=ranks,
        lengths=tuple(map(len, prompts)),
        error=max(map(_error, found, wanted)),
        allowed=ALLOWED.get(dtype, ALLOWED_16_BITS),
        new_tokens=len(wanted[0].outputs[0].token_ids),
        first_difference=first_difference(*map(_tokens, (wanted, found))),
        tokens_count=dtype in ALLOWED,
    )


def _prompts(llm: LLM) -> list[list[int]]:
    """All sets of prompts as one batch."""
    limit = llm.max_model_len - min(NEW_TOKENS, llm.max_model_len // 2)
    lengths = tuple(length for group in LENGTHS.values() for length in group)
    return excerpts(text_tokens(llm.tokenizer, llm.engine.vocab_size or 256, 0), lengths, limit)


def _run(llm: LLM, prompts: Sequence[list[int]]) -> list[RequestOutput]:
    new = min(NEW_TOKENS, llm.max_model_len // 2)
    wanted: dict[str, Any] = {"max_tokens": new, "prompt_logprobs": min(SHOWN, llm.engine.max_logprobs)}
    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **wanted)
    return llm.generate(list(prompts), params, use_tqdm=False)


def _error(found: RequestOutput, wanted: RequestOutput) -> float:
    """The largest difference of the log-probabilities that both outputs contain; the prompt's tokens are in both."""
    pairs = zip(found.prompt_logprobs or (), wanted.prompt_logprobs or (), strict=True)
    differences = [
        abs(ours[token].logprob - theirs[token].logprob)
        for ours, theirs in pairs
        if ours and theirs
        for token in ours.keys() & theirs.keys()
    ]
    return max(differences, default=0.0)


def _tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]

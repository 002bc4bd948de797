"""`outpace.pipeline`: the API of DeepSpeed-MII."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.errors import InputError
from outpace.llm import LLM
from outpace.types import RequestOutput, SamplingParams


@dataclass(frozen=True)
class Response:
    """An answer with MII's names."""

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: str

    def __str__(self) -> str:
        return self.generated_text


class Pipeline:
    """Prompts in, responses out: `pipe(["DeepSpeed is"], max_new_tokens=64)`."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def __call__(
        self,
        prompts: str | Sequence[str],
        *,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        do_sample: bool = True,
        top_p: float = 0.9,
        top_k: int | None = None,
        temperature: float | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        return_full_text: bool = False,
        seed: int | None = None,
        **unknown: Any,
    ) -> list[Response]:
        """Answer each prompt. `max_length` counts the prompt; without a limit an answer may fill the model's length."""
        if unknown:
            raise InputError(f"{next(iter(unknown))}: the pipeline has no such argument")
        given = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(given, list | tuple) or not all(isinstance(prompt, str) for prompt in given):
            raise InputError(f"prompts: expected text or a list of texts, got {prompts!r:.80}")
        if not isinstance(do_sample, bool):
            raise InputError(f"do_sample: expected True or False, got {do_sample!r:.80}")
        longest = self._longest(max_length)
        _check_count("max_new_tokens", max_new_tokens, 1)
        _check_count("min_new_tokens", min_new_tokens, 0)
        warmth = (1.0 if temperature is None else temperature) if do_sample else 0.0
        shared: dict[str, Any] = {
            "min_tokens": min_new_tokens, "temperature": warmth, "top_p": top_p,
            "top_k": top_k or 0, "stop": stop, "ignore_eos": ignore_eos, "seed": seed,
        }  # fmt: skip
        tokens = [self.llm.tokenize(prompt) for prompt in given]
        params = []
        for ids in tokens:
            room = longest - len(ids)
            if room < 1:
                raise InputError(f"max_length: a prompt of {len(ids)} tokens leaves no room in {longest}")
            new = min(max_new_tokens or room, room)
            params.append(SamplingParams(max_tokens=new, **{**shared, "min_tokens": min(min_new_tokens, new)}))
        outputs = self.llm.generate(tokens, params, use_tqdm=False)
        heads = given if return_full_text else [""] * len(given)
        return [_response(output, head) for output, head in zip(outputs, heads, strict=True)]

    def _longest(self, max_length: int | None) -> int:
        _check_count("max_length", max_length, 1)
        if max_length is not None and max_length > self.llm.max_model_len:
            raise InputError(f"max_length: {max_length} is more than max_model_len={self.llm.max_model_len}")
        return max_length or self.llm.max_model_len

    def destroy(self) -> None:
        """Free the model."""
        self.llm.shutdown()


def _check_count(name: str, value: object, least: int) -> None:
    if value is not None and (type(value) is not int or value < least):
        raise InputError(f"{name}: expected an integer from {least}, got {value!r:.80}")


def _response(output: RequestOutput, head: str) -> Response:
    answer = output.outputs[0]
    reason = "none" if answer.finish_reason is None else answer.finish_reason.value
    return Response(head + answer.text, len(output.prompt_token_ids), len(answer.token_ids), reason)

"""`outpace.pipeline`: what people who come from MII call."""

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
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        tokens = [self.llm.tokenize(prompt) for prompt in given]
        longest = min(max_length or self.llm.max_model_len, self.llm.max_model_len)
        shared: dict[str, Any] = {
            "min_tokens": min_new_tokens, "temperature": (temperature or 1.0) if do_sample else 0.0, "top_p": top_p,
            "top_k": top_k or 0, "stop": stop, "ignore_eos": ignore_eos, "seed": seed,
        }  # fmt: skip
        params = []
        for ids in tokens:
            room = longest - len(ids)
            if room < 1:
                raise InputError(f"max_length: a prompt of {len(ids)} tokens leaves no room in {longest}")
            params.append(SamplingParams(max_tokens=min(max_new_tokens or room, room), **shared))
        outputs = self.llm.generate(tokens, params, use_tqdm=False)
        heads = given if return_full_text else [""] * len(given)
        return [_response(output, head) for output, head in zip(outputs, heads, strict=True)]

    def destroy(self) -> None:
        """Let go of the model."""
        self.llm.shutdown()


def _response(output: RequestOutput, head: str) -> Response:
    answer = output.outputs[0]
    reason = "none" if answer.finish_reason is None else answer.finish_reason.value
    return Response(head + answer.text, len(output.prompt_token_ids), len(answer.token_ids), reason)

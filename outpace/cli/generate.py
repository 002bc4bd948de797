"""`outpace generate`: answer one prompt and show the speed."""

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outpace.cli.model import OnlyModel
from outpace.cli.talk import (
    Device,
    DType,
    GenerationConfig,
    Quantization,
    Ranks,
    Seed,
    Stages,
    Temperature,
    TopP,
    given,
    need_tokenizer,
)
from outpace.errors import InputError

if TYPE_CHECKING:
    from outpace.llm import LLM
    from outpace.types import RequestOutput, SamplingParams


def command(
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads it from standard input.")],
    model: OnlyModel = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens.")] = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many likeliest tokens; 0: from all.")] = None,
    seed: Seed = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    generation_config: GenerationConfig = None,
    dtype: DType = None,
    quantization: Quantization = None,
    device: Device = None,
    tensor_parallel_size: Ranks = None,
    pipeline_parallel_size: Stages = None,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Without CUDA graphs: ready sooner, slower.")
    ] = False,
) -> None:
    """Answer a prompt. The text is streamed to standard output; figures go to standard error."""
    from outpace.llm import LLM
    from outpace.types import SamplingParams

    options = {"max_tokens": max_tokens, **given(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)}
    SamplingParams(**options)  # check values before the model is loaded
    asked = text_of(prompt)
    begin = time.perf_counter()
    more: dict[str, Any] = given(generation_config=generation_config, quantization=quantization)
    more |= given(tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size)
    llm = LLM(model, dtype=dtype, device=device, enforce_eager=enforce_eager or None, max_num_seqs=1, **more)
    ready = time.perf_counter() - begin
    need_tokenizer(llm)
    output = _answer(llm, asked, system, raw, SamplingParams(**{**llm.engine.sampling_defaults, **options}))
    _report(Console(stderr=True), llm, output, ready)


def text_of(prompt: str) -> str:
    """The prompt, or standard input if it is `-`."""
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"prompt: standard input is not UTF-8 from byte {error.start} on; give it as UTF-8") from None


def _answer(llm: "LLM", prompt: str, system: str | None, raw: bool, params: "SamplingParams") -> "RequestOutput":
    messages = [{"role": "system", "content": system}] if system else []
    asked = prompt if raw else llm.apply_chat_template([*messages, {"role": "user", "content": prompt}])
    shown = 0
    for output in llm.stream(asked, params):
        text = output.outputs[0].text
        _write(text[shown:])
        shown = len(text)
    _write("\n")
    return output


def _write(text: str) -> None:
    """Write and flush. A closed pipe (`| head`) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
        raise typer.Exit(141) from None  # 128 + SIGPIPE, like other programs


def _report(console: Console, llm: "LLM", output: "RequestOutput", ready: float) -> None:
    answer, first, speed = output.outputs[0], output.metrics.time_to_first_token, output.decode_tokens_per_second
    console.print(
        f"[dim]{llm.name} on {llm.device} in {str(llm.dtype).removeprefix('torch.')} ({llm.dtype_reason})"
        f"{'' if llm.quantized is None else f', weights {llm.quantized}'}\n"
        f"{len(output.prompt_token_ids)} prompt tokens, {len(answer.token_ids)} new ({answer.finish_reason}) · "
        f"{f'{speed:.1f} tokens/s' if speed else 'one token'} · first token after {(first or 0) * 1e3:.0f} ms · "
        f"ready after {ready:.1f} s[/]",
        highlight=False,
    )

"""Deltas between the engine and the writer: they get their text, and those of all prompts are merged."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace

from outpace.errors import EngineDead, InputError
from outpace.server.async_tokenizer import AsyncTokenizer
from outpace.server.engine import Delta, Engine, EngineRequest
from outpace.server.observe import Observer, observed
from outpace.structured.outputs import FIELD
from outpace.tokenizer import Detokenizer
from outpace.types import FinishReason

_AHEAD = 16  # deltas of each prompt that may wait for a slow reader


async def deltas_of_request(
    engine: Engine, prompts: Sequence[EngineRequest], tokenizer: AsyncTokenizer, request_id: str, observer: Observer
) -> AsyncGenerator[Delta, None]:
    """The deltas of all prompts as they come, counted by the observer.

    An error of one prompt ends all. Several prompts are admitted together, or none of them.
    """
    requests = [replace(prompt, request_id=f"{request_id}-{number}") for number, prompt in enumerate(prompts)]
    sources = [_deltas_of_prompt(engine, request, tokenizer, number) for number, request in enumerate(requests)]
    alone = len(sources) == 1
    with observed(prompts, observer) as count, nullcontext() if alone else engine.room(requests):
        async with aclosing(sources[0] if alone else _merge(sources)) as deltas:
            async for delta in deltas:
                count(delta)
                yield delta


async def _deltas_of_prompt(
    engine: Engine, request: EngineRequest, tokenizer: AsyncTokenizer, prompt: int
) -> AsyncGenerator[Delta, None]:
    """The deltas of one prompt with their text. The engine ends an answer as soon as its text has met a stop string."""
    count = request.params.n
    answers = [_Answer(request, tokenizer) for _ in range(count)]
    try:
        async with aclosing(engine.generate(request)) as deltas:
            async for delta in deltas:
                answer = answers[delta.index]
                if answer.finished:
                    continue  # it met a stop string, and the engine did not know yet
                if answer.add_text(delta):
                    request.unwanted.add(delta.index)
                if answer.check is not None:
                    await answer.run_check(delta)
                delta.index += prompt * count
                yield delta
                if all(answer.finished for answer in answers):
                    return
    except InputError as error:  # of the grammar: name the field that asked for it
        said = str(error)
        named = request.structure and said.startswith(FIELD)
        raise InputError(said.replace(FIELD, request.structure, 1) if named else said) from None
    raise EngineDead("the engine left a request unanswered")


class _Answer:
    """Turns the tokens of one answer into text, up to a stop string."""

    def __init__(self, request: EngineRequest, tokenizer: AsyncTokenizer) -> None:
        params = request.params
        self._text = Detokenizer(
            tokenizer.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=tuple(params.stop),
            include_stop_str_in_output=params.include_stop_str_in_output,
            prompt_token_ids=request.prompt_token_ids,
        )
        self._said: list[str] = []  # its whole text, if it will be checked
        self.check = request.grammar.check if request.grammar is not None else None
        """Checks the whole answer for rules that its grammar does not enforce."""
        self.finished = False

    def add_text(self, delta: Delta) -> bool:
        """Set the text of a delta, and drop its tokens after a stop string. Returns whether a stop string has ended the
        answer, which the engine does not know yet."""
        text, ended = self._text, delta.finish_reason is not None
        for used, token in enumerate(delta.token_ids, 1):
            text.add(token)
            if text.stopped:
                del delta.token_ids[used:]
                if delta.logprobs is not None:
                    del delta.logprobs[used:]
                break
        if ended or text.stopped:
            self.finished = True
            text.finish()
            if text.stopped:  # `finish` may find a stop string too
                delta.finish_reason, delta.stop_reason = FinishReason.STOP, text.stop_reason
        delta.text = text.take()
        return self.finished and not ended

    async def run_check(self, delta: Delta) -> None:
        """Check the answer, if this is its last delta and it is whole."""
        assert self.check is not None, "only asked of answers with a check"
        self._said.append(delta.text)
        if delta.finish_reason is FinishReason.STOP:
            delta.check = await asyncio.to_thread(self.check, "".join(self._said))


async def _merge(sources: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    waiting: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(_AHEAD * len(sources))

    async def pump(source: AsyncGenerator[Delta, None]) -> None:
        last: BaseException | None = None
        try:
            async with aclosing(source):
                async for delta in source:
                    await waiting.put(delta)
        except Exception as error:
            last = error
        await waiting.put(last)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await waiting.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

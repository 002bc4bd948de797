"""Answers of the engine process that are not sent yet: tokens stay in their requests until a frame takes them."""

from dataclasses import dataclass

from outpace.answers import Group
from outpace.server.engine import Delta
from outpace.server.messages import Failure, News, wire_logprobs, wire_prompt_logprobs
from outpace.types import CompletionOutput, FinishReason, RequestOutput

MAX_LOGPROBS = 1 << 22
"""Most log-probabilities of one prompt. A frame that has this many gets no more, so it stays below twice as many."""


@dataclass(slots=True)
class Live:
    """A request that is being answered, and how much of it has been sent."""

    group: Group
    sent: list[int]  # tokens of each answer
    begun: bool = False
    scheduled_at: float | None = None  # when the first step with it began

    @property
    def output(self) -> RequestOutput:
        """Its answers so far."""
        return self.group.output

    @property
    def prompt_only(self) -> bool:
        """Whether its answers have no tokens: each has one delta, sent when the prompt is computed."""
        return self.group.params.max_tokens == 0 and self.output.pooled is None

    def times(self) -> tuple[float, float] | None:
        """Seconds in the queue, and from its end to the first token."""
        metrics, begin = self.output.metrics, self.scheduled_at
        if begin is None or metrics.first_token_time is None:
            return None
        return max(0.0, begin - metrics.arrival_time), max(0.0, metrics.first_token_time - begin)


class Unsent:
    """Requests that are being answered, and the next frame."""

    def __init__(self) -> None:
        self.live: dict[int, Live] = {}
        """By number, until all of a request is in a frame."""
        self.changed: dict[int, None] = {}
        """Requests that may have something to send."""
        self.news = News()
        """The next frame; the worker puts everything but answers here directly."""
        self.prompt_tokens = self.generated_tokens = 0
        """Totals of what was put into frames."""

    def fail(self, number: int, kind: str, message: str) -> None:
        """Forget a request that cannot be answered, and send the error."""
        self.forget(number)
        self.news.failures.append(Failure(number, kind, message))

    def forget(self, number: int) -> None:
        """Send nothing more of a request."""
        self.live.pop(number, None)
        self.changed.pop(number, None)

    def drop_answer(self, number: int, index: int) -> None:
        """Send only the end of one answer: the rest of its tokens is not wanted."""
        live = self.live[number]
        unsent = len(live.output.outputs[index].token_ids) - live.sent[index]
        live.sent[index] += unsent
        self.generated_tokens += unsent
        self.news.deltas.append(Delta(index, [], finish_reason=FinishReason.STOP, number=number))
        self.changed[number] = None  # it may have been the last

    def collect(self) -> News:
        """The frame, with all that fits of what has changed; the rest goes in the next one."""
        room = MAX_LOGPROBS
        for number in list(self.changed):
            if room > 0:
                room -= self._collect(number, room)
        return self.news

    def _collect(self, number: int, room: int) -> int:
        """Put the unsent tokens of a request in the frame, up to about `room` log-probabilities; returns how many.

        Those of a prompt are never split. Numbers of a vector count like log-probabilities.
        """
        live = self.live[number]
        if live.prompt_only and not live.output.finished:
            del self.changed[number]  # wait for all of its n answers
            return 0
        new, taken = self._new_deltas(number, live, room)
        if new and not live.begun:
            taken += self._add_prompt(live, new[0])
        self.news.deltas += new
        if live.sent == [len(completion.token_ids) for completion in live.output.outputs]:
            del self.changed[number]
            if live.output.finished:
                taken += self._finish(number)
        return taken

    def _new_deltas(self, number: int, live: Live, room: int) -> tuple[list[Delta], int]:
        """A delta for each answer with unsent tokens, and the number of their log-probabilities."""
        new: list[Delta] = []
        taken = 0
        for index, completion in enumerate(live.output.outputs):
            sent = live.sent[index]
            if live.prompt_only or (len(completion.token_ids) > sent and taken < room):
                delta = _delta(number, completion, sent, room - taken)
                live.sent[index] += len(delta.token_ids)
                self.generated_tokens += len(delta.token_ids)
                taken += sum(map(len, delta.logprobs or ()))
                new.append(delta)
        return new, taken

    def _add_prompt(self, live: Live, first: Delta) -> int:
        """Add what is sent once for a request to its first delta; returns the number of log-probabilities added."""
        live.begun = True
        self.prompt_tokens += len(live.output.prompt_token_ids)
        first.times, first.num_cached_tokens = live.times(), live.output.num_cached_tokens
        found = live.output.prompt_logprobs
        if found is None:
            return 0
        first.prompt_logprobs = wire_prompt_logprobs(found)
        return sum(len(entry) for entry in found if entry)

    def _finish(self, number: int) -> int:
        """Forget a request that is sent completely; returns the length of its vector."""
        live = self.live.pop(number)
        if not live.begun:
            self.prompt_tokens += len(live.output.prompt_token_ids)
        vector = live.output.pooled
        if vector is None:
            return 0
        self.news.vectors.append((number, vector))
        return len(vector)


def _delta(number: int, completion: CompletionOutput, sent: int, room: int) -> Delta:
    """The unsent part of an answer, cut to about `room` log-probabilities."""
    end = len(completion.token_ids)
    if completion.logprobs:
        end = min(end, sent + max(1, room // max(1, len(completion.logprobs[sent]))))
    delta = Delta(completion.index, completion.token_ids[sent:end], number=number)
    if end == len(completion.token_ids):
        delta.finish_reason = completion.finish_reason
        delta.stop_reason = completion.stop_reason if isinstance(completion.stop_reason, int) else None
    if completion.logprobs is not None:
        delta.logprobs = [wire_logprobs(found) for found in completion.logprobs[sent:end]]
        completion.logprobs[sent:end] = [{}] * (end - sent)  # not needed any more
    return delta

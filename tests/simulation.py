"""A scheduler with requests and no model: every step is checked, and tokens are drawn at random."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from outpace.cache.block_pool import BlockPool
from outpace.cache.tiers import Tiers
from outpace.scheduler import Scheduler
from outpace.sequence import WINDOW, Sequence, Status
from outpace.types import (
    Copy,
    FinishReason,
    Request,
    SamplingParams,
    ScheduledSequence,
    Step,
    StepOutput,
    Way,
)

EOS = 0
VOCAB = 12
AWAY = (Status.LOADING, Status.FETCHING)
Slot = tuple[int, int] | None


def next_token(slots: list[Slot]) -> int:
    """What follows these (position, token); about one in twelve ends the answer."""
    return hash(tuple(-1 if slot is None else slot[0] * 1009 + slot[1] for slot in slots)) % VOCAB


def alone(request: Request) -> tuple[list[int], FinishReason]:
    """The answer to a request that has the machine for itself, worked out without pages or steps."""
    tokens, params = list(request.prompt_token_ids), request.params
    answer: list[int] = []
    while len(answer) < request.max_tokens:  # none at all where the request is for the prompt alone
        answer.append(next_token(list(enumerate(tokens + answer))))
        stops = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *request.eos_token_ids)
        if answer[-1] in stops and len(answer) > params.min_tokens:
            return answer, FinishReason.STOP
    return answer, FinishReason.LENGTH


WAYS = {
    Way.STORE: ("device", "host"),
    Way.LOAD: ("host", "device"),
    Way.WRITE: ("host", "files"),
    Way.READ: ("files", "host"),
}


@dataclass
class Row:
    """A request as the runner knows it."""

    tokens: list[int]
    table: list[int]
    num_computed: int
    prompt_only: bool
    told: list[int] = field(default_factory=list)


class Runner:
    """Runs steps as a device would: rows and pages of its own, fed by nothing but steps.

    Copies take their time: each is done when somebody waits for it, or when the random `slow` says so, and reads and
    writes only then, in any order. What is read or written too early or too late shows in the answers.
    """

    def __init__(
        self, block_size: int, slow: random.Random | None = None, broken_files: float = 0.0, depth: int = 1
    ) -> None:
        self.block_size = block_size
        self.depth = depth
        self.slow = slow
        self.broken_files = broken_files
        self.rows: dict[str, Row] = {}
        self.pages: dict[tuple[int, int], Slot] = {}
        self.levels: dict[str, dict[tuple[int, int], Slot]] = {"device": self.pages, "host": {}, "files": {}}
        self.copying: dict[int, Copy] = {}
        self.copied: dict[int, tuple[int, ...]] = {}
        self.seen = Counter[Way]()

    def run(self, step: Step) -> StepOutput:
        for request_id in (*step.ended, *step.preempted):
            self.rows.pop(request_id, None)
        assert self.copying.keys().isdisjoint(step.copied), "reported done"
        self._begin([copy for copy in step.copies if copy.way is not Way.LOAD])
        for copy_id in step.after:
            self._finish(copy_id)
        self._begin([copy for copy in step.copies if copy.way is Way.LOAD])
        for entry in step.sequences:
            self._write(entry)
        self._check_sharing()
        sampling = [entry for entry in step.sequences if entry.samples and not self.rows[entry.request_id].prompt_only]
        return StepOutput(step.step_id, {entry.request_id: self._sample(entry) for entry in sampling})

    def done(self, *, wait: bool) -> dict[int, tuple[int, ...]]:
        """What is done when the output of a step is read."""
        for copy_id in list(self.copying):
            if self.slow is None or self.slow.random() < 0.2:
                self._finish(copy_id)
        if wait and not self.copied and self.copying:
            assert self.slow is not None
            self._finish(self.slow.choice(list(self.copying)))
        found, self.copied = self.copied, {}
        return found

    def _begin(self, copies: list[Copy]) -> None:
        for copy in copies:
            assert copy.pairs
            assert copy.copy_id not in self.copying
            for other in self.copying.values():  # what is written by a copy is used by no other one
                for mine, theirs in ((copy, other), (other, copy)):
                    written, used = self._used(mine)[1], {*self._used(theirs)[0], *self._used(theirs)[1]}
                    assert written.isdisjoint(used), f"{mine} writes what {theirs} uses"
            self.copying[copy.copy_id] = copy
            self.seen[copy.way] += len(copy.pairs)

    def _used(self, copy: Copy) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
        source, target = WAYS[copy.way]
        return {(source, block) for block, _ in copy.pairs}, {(target, block) for _, block in copy.pairs}

    def _finish(self, copy_id: int) -> None:
        copy = self.copying.pop(copy_id, None)
        if copy is None:
            return
        source, target = (self.levels[name] for name in WAYS[copy.way])
        failed: list[int] = []
        for place, (block, to) in enumerate(copy.pairs):
            files = copy.way in (Way.READ, Way.WRITE)
            broken = files and self.slow is not None and self.slow.random() < self.broken_files
            failed += [place] * broken
            for offset in range(self.block_size):
                target[to, offset] = None if broken else source.get((block, offset))
        self.copied[copy_id] = tuple(failed)

    def _write(self, entry: ScheduledSequence) -> None:
        if entry.request is not None:
            assert entry.request_id not in self.rows
            assert entry.token_ids[: len(entry.request.prompt_token_ids)] == entry.request.prompt_token_ids
            self.rows[entry.request_id] = Row(list(entry.token_ids), [], entry.start, entry.request.prompt_only)
        row = self.rows[entry.request_id]
        row.table += entry.new_blocks
        if self.depth > 1:
            self._tell_first_stage(row, entry)
        assert entry.num_new_tokens > 0
        assert entry.start == row.num_computed, "tokens are computed once, in order"
        row.num_computed += entry.num_new_tokens
        assert len(row.table) == -(-row.num_computed // self.block_size)
        for position in range(entry.start, row.num_computed):
            self.pages[self._place(row, position)] = (position, row.tokens[position])

    def _tell_first_stage(self, row: Row, entry: ScheduledSequence) -> None:
        """The first stage knows the tokens that steps bring, and no others."""
        first = 0 if entry.request is not None else entry.start
        row.told[first : first + len(entry.token_ids)] = entry.token_ids
        end = entry.start + entry.num_new_tokens
        assert row.told[:end] == row.tokens[:end], "a token that the first stage has not been told"

    def _sample(self, entry: ScheduledSequence) -> int:
        row = self.rows[entry.request_id]
        assert row.num_computed == len(row.tokens)
        row.tokens.append(next_token([self.pages.get(self._place(row, place)) for place in range(row.num_computed)]))
        return row.tokens[-1]

    def _place(self, row: Row, position: int) -> tuple[int, int]:
        return row.table[position // self.block_size], position % self.block_size

    def _check_sharing(self) -> None:
        """A block stands in two tables only as the same full block of the same prefix."""
        first: dict[int, tuple[int, Row]] = {}
        for row in self.rows.values():
            for index, block in enumerate(row.table):
                other_index, other = first.setdefault(block, (index, row))
                if other is not row:
                    end = (index + 1) * self.block_size
                    assert index == other_index
                    assert row.tokens[:end] == other.tokens[:end]
                    assert end <= min(row.num_computed, other.num_computed)


@dataclass
class Simulation:
    """Scheduler and runner in a loop, with what must hold after every call."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    budget: int = 16
    swap_space: int = 0
    kv: int = 0
    kv_files: int = 0
    slow: random.Random | None = None
    broken_files: float = 0.0
    caching: bool = True
    overlap: int = 0
    depth: int = 1
    max_waiting: int = 1000
    chunk: int | None = None
    streamed_budget: int | None = None
    longest_first: bool = False
    padded: tuple[int, ...] = ()
    answers: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    windows: dict[str, int] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    flying: deque[tuple[Step, StepOutput]] = field(default_factory=deque)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size, enable_prefix_caching=self.caching)
        self.tiers = Tiers(self.pool, self.kv or self.swap_space, self.kv_files, keep_prefixes=self.kv > 0)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.num_blocks * self.block_size + 1,
            max_waiting=self.max_waiting,
            max_chunk_beside_decodes=self.chunk,
            max_streamed_tokens=self.streamed_budget,
            longest_first=self.longest_first,
            padded_sizes=self.padded,
            depth=self.depth,
            tiers=self.tiers,
        )
        self.runner = Runner(self.block_size, self.slow, self.broken_files, self.depth)
        self.unstarted: dict[tuple[str, int], deque[str]] = {}

    def add(self, prompt: list[int] | int, max_tokens: int = 4, name: str | None = None, **more: Any) -> str:
        """Queue a request; a number is the length of a prompt that nobody else has."""
        name = name or str(len(self.requests))
        tokens = [VOCAB + len(self.requests)] * prompt if isinstance(prompt, int) else prompt
        params = SamplingParams(max_tokens=max_tokens, **more.pop("params", {"ignore_eos": True}))
        request = Request(request_id=name, prompt_token_ids=tuple(tokens), params=params, eos_token_ids=(EOS,), **more)
        self.scheduler.check(request)
        self.scheduler.add(request)
        self.windows[name] = len(self.requests) // WINDOW
        self.requests[name] = request
        self.answers[name] = []
        self.unstarted.setdefault((request.caller, request.priority), deque()).append(name)
        return name

    def abort(self, name: str) -> bool:
        done = self.scheduler.abort(name)
        if done:
            assert name not in self.reasons
            self.aborted.add(name)
        return done

    def schedule(self) -> Step:
        step = self.scheduler.schedule()
        assert step.num_tokens <= self.budget
        live = self.requests.keys() - self.reasons.keys() - self.aborted
        streamed = any(self.requests[name].streamed for name in live)
        if streamed:
            assert step.num_tokens <= self.scheduler.sizes.max_streamed_tokens
        assert len({entry.request_id for entry in step.sequences}) == len(step.sequences) <= self.max_num_seqs
        decodes = any(
            entry.samples and entry.num_new_tokens == 1 and entry.request is None
            for entry in step.sequences
            if self.chunk is not None or streamed
        )
        longest = max((entry.num_new_tokens for entry in step.sequences), default=0)
        assert not decodes or longest <= self.scheduler.max_chunk_beside_decodes
        away = {name for name, each in self.scheduler._sequences.items() if each.status in AWAY}
        for queue in self.unstarted.values():
            if not away.isdisjoint(queue):
                started = [name for name in queue if name not in away]
                queue.clear()
                queue.extend(started)
        for entry in step.sequences:
            assert entry.request_id not in self.reasons.keys() | self.aborted | step.preempted.keys()
            if entry.request is not None:
                self._check_turn(entry.request)
        if self.depth > 1:
            chosen = {each.request_id for other, _ in self.flying for each in other.sequences if each.samples}
            assert chosen.isdisjoint(entry.request_id for entry in step.sequences), "its token is not known yet"
        self.flying.append((step, self.runner.run(step)))
        self.steps.append(step)
        return step

    def _check_turn(self, request: Request) -> None:
        """First come, first served within a priority, for each caller, or the longest first."""
        queue = self.unstarted[request.caller, request.priority]
        if request.request_id in queue:
            waiting = [name for name in queue if name not in self.aborted]
            if self.longest_first:
                waiting.sort(key=lambda name: (self.windows[name], -self.requests[name].max_tokens))
            assert waiting[0] == request.request_id
            queue.remove(request.request_id)

    def update(self) -> list[tuple[Sequence, FinishReason | None]]:
        step, output = self.flying.popleft()
        output.copied = self.runner.done(wait=step.waits)
        new = self.scheduler.update(output)
        for sequence, reason in new:
            name = sequence.request.request_id
            assert name not in self.reasons.keys() | self.aborted
            if not sequence.prompt_only:
                self.answers[name].append(sequence.tokens[-1])
            if reason is not None:
                self.reasons[name] = reason
        return new

    def step(self) -> Step:
        """One turn of an engine's loop that runs `overlap` steps ahead."""
        step = self.schedule()
        if len(self.flying) > self.overlap:
            self.update()
        return step

    def drain(self) -> int:
        """Run to the end within a bound that no starving request could keep; everything is given back."""
        todo = [name for name in self.requests if name not in self.reasons.keys() | self.aborted]
        tokens = sum(len(self.requests[name].prompt_token_ids) + self.requests[name].max_tokens for name in todo)
        in_order = len({(self.requests[name].priority, self.requests[name].caller) for name in todo}) < 2
        bound = ((tokens + len(todo)) * (1 if in_order else max(1, len(todo)))) * (self.depth + self.overlap) + 10
        for count in range(bound):
            if not self.scheduler.has_work:
                self.check_end()
                return count
            self.step()
            while self.flying and not self.flying[-1][0].sequences:
                self.update()
        raise AssertionError(f"not at the end after {bound} steps")

    def check_end(self) -> None:
        assert self.pool.num_free == self.num_blocks
        slow, self.runner.slow = self.runner.slow, None
        while self.runner.copying or self.runner.copied:  # what goes down need not be over when the last request is
            self.schedule()
            self.update()
        self.runner.slow = slow
        assert self.tiers.host.num_free == self.tiers.host.num_blocks
        assert self.tiers.files.num_free == self.kv_files
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        self.scheduler.assert_consistent()
        self.check_answers()
        assert self.reasons.keys() | self.aborted == self.requests.keys()

    def check_answers(self) -> None:
        for name, request in self.requests.items():
            answer, reason = alone(request)
            assert self.answers[name] == answer[: len(self.answers[name])]
            if name in self.reasons:
                assert (self.answers[name], self.reasons[name]) == (answer, reason)

    def shape(self, step: Step) -> dict[str, tuple[int, int, bool]]:
        """Who is in a step: first position, tokens, whether it samples."""
        return {entry.request_id: (entry.start, entry.num_new_tokens, entry.samples) for entry in step.sequences}


def crowded(**more: Any) -> tuple[Simulation, list[str]]:
    """Three requests that fill the cache of twelve blocks after a few steps and want more."""
    sim = Simulation(num_blocks=12, budget=48, **more)
    return sim, [sim.add(15, max_tokens=20) for _ in range(3)]


def first_preemption(sim: Simulation) -> Step:
    for _ in range(30):
        step = sim.step()
        if step.preempted:
            return step
    raise AssertionError("nobody was preempted")


def crowd(seed: int, count: int = 60, **more: Any) -> Simulation:
    """Requests for ten times the cache, all at once."""
    rng, sim = random.Random(seed), Simulation(num_blocks=24, **more)
    starts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(24))] for _ in range(4)]
    for _ in range(count):
        prompt = rng.choice(starts)[: rng.randrange(1, 25)] + [
            rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))
        ]
        sim.add(prompt, max_tokens=rng.randrange(1, 40), params={"ignore_eos": rng.random() < 0.7})
    return sim

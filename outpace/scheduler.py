"""Dynamic SplitFuse: which tokens of which requests the next step computes. Pure Python; no tensor is seen here.

There are no phases. A request has tokens and a number of them computed; a step gives each running request its next
tokens out of one budget, then lets waiting ones in with what is left, so a long prompt is chopped and a decode is a
request that misses one token. Requests are ordered by (priority, arrival); "first" below means in that order.

Why it cannot deadlock. (1) `add` refuses a request that alone, grown to its end, would not fit the pool. (2) The budget
is at least `max_num_seqs` and one token is kept for each running request, so tokens never run out before requests do.
(3) A running request that finds no block takes those of the last running ones, so the first one needs to wait only
while blocks are held by ended requests of steps in flight, and `update` brings these back: it computes a token in every
step, is never preempted, and ends. (4) Nobody overtakes the first waiting request, and it needs no more than the pool,
so it comes in at the latest when the running ones have ended. Hence by induction over the order every request ends, if
requests of smaller priority do not arrive for ever.

One step ahead. `schedule` may be called again before `update`: tokens in flight are counted though they are not known.
Steps run in order on the device, so the blocks of a preempted request can be given away at once: what was in flight is
written before the next step writes. Those of an ended request are kept until its last step is updated.
"""

from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum, auto

from outpace.cache.block_pool import BlockPool, block_hashes
from outpace.errors import ConfigError, InputError, Overloaded
from outpace.types import FinishReason, NewToken, Preemption, Request, ScheduledSequence, Step, StepOutput

MAX_CHUNK = 384  # tokens of one prompt beside decodes, unless asked otherwise


class _Status(Enum):
    WAITING = auto()  # new, or preempted: by recompute (nothing computed) or by swap (its blocks are host blocks)
    RUNNING = auto()
    ENDED = auto()  # and kept only for the steps in flight


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request and how far it has come."""

    request: Request
    order: tuple[int, int]
    limit: int  # most tokens it can have
    stops: frozenset[int]
    salt: str
    tokens: list[int]  # known ones: the prompt and the answer so far
    status: _Status = _Status.WAITING
    num_pending: int = 0  # tokens that steps in flight sample
    num_computed: int = 0  # tokens in the cache once the steps in flight are done
    num_registered: int = 0  # full blocks that the pool has been told of
    num_cached: int | None = None  # tokens that were in the cache when it first ran
    in_flight: int = 0  # steps
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)

    @property
    def target(self) -> int:
        """Tokens to compute so far; the last one it can have is never read again."""
        return min(len(self.tokens) + self.num_pending, self.limit - 1)


def _order(sequence: _Sequence) -> tuple[int, int]:
    return sequence.order


@dataclass(slots=True)
class _Draft:
    """A step being put together, and the room that is left in it."""

    step: Step
    budget: int  # tokens
    chunk: int  # most of them for one request
    unserved: int  # running requests still to come, each of which has one token kept for it
    claimed: int = 0  # blocks that requests in this step will need for the tokens they have
    prefill: int = 0  # tokens of prompts, and of answers that are computed once more
    flying: list[tuple[_Sequence, int, bool]] = field(default_factory=list)  # sequence, its end, whether it samples

    def room(self, sequence: _Sequence) -> int:
        """Tokens that this request may have."""
        return min(sequence.target - sequence.num_computed, self.chunk, self.budget - self.unserved)


@dataclass(slots=True)
class Totals:
    """What has been scheduled so far."""

    steps: int = 0
    """Steps that computed anything."""
    prefill_tokens: int = 0
    """Tokens of prompts, and those that are computed once more after a preemption."""
    decode_tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    """Tokens that were found in the cache when their request came in."""
    prefix_queries: int = 0
    """Tokens that were looked for there."""


class Scheduler:
    """Requests in, steps out. Every step, also an empty one, is answered by one `update`, in order; for one thread."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_waiting: int,
        max_chunk_beside_decodes: int | None = None,
        swap_space: int = 0,
        model: str = "",
        totals: Totals | None = None,
    ) -> None:
        """`swap_space` counts host blocks; `model` keeps the prefixes of different models apart; `totals` go on.

        `max_chunk_beside_decodes`: most tokens of one prompt in a step while other requests decode. A quarter of the
        budget and no more than 384, which still is bound by computing (from 184 tokens on, for 8B in bf16 on an H200),
        so the prompt loses little, while a step beside 32 decodes should stay below 2.5 times one without a prompt (512
        made it 2.6 to 3 times: 13 to 16 ms against 5.2), and several prompts advance side by side.
        """
        quarter = max(1, min(MAX_CHUNK, max_num_batched_tokens // 4))
        chunk = quarter if max_chunk_beside_decodes is None else max_chunk_beside_decodes
        if chunk < 1:
            raise ConfigError(f"max_chunk_beside_decodes: must be at least 1, got {chunk}")
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens={max_num_batched_tokens}: must be at least max_num_seqs={max_num_seqs} (>= 1),"
                " a token for each request"
            )
        self.pool = pool
        self.host_pool = BlockPool(swap_space, pool.block_size, enable_prefix_caching=False)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_waiting = max_waiting
        self.max_chunk_beside_decodes = chunk
        self.model = model
        self.totals = totals or Totals()
        self._sequences: dict[str, _Sequence] = {}
        self._running: list[_Sequence] = []  # both in order
        self._waiting: list[_Sequence] = []
        self._ended: list[str] = []  # since the last step
        self._in_flight: deque[tuple[int, list[tuple[_Sequence, int, bool]]]] = deque()
        self._num_added = 0
        self._num_steps = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and get tokens in every step."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that are new or were preempted."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended or a step has not been updated."""
        return bool(self._sequences or self._in_flight)

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request of that name waits for its first step, or to be taken in again."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and sequence.status is _Status.WAITING

    def check(self, request: Request) -> None:
        """Say why a request could never run, if that is so."""
        num_prompt, params = len(request.prompt_token_ids), request.params
        limit = num_prompt + params.max_tokens
        what = f"max_tokens: {num_prompt} prompt tokens and max_tokens={params.max_tokens}"
        if num_prompt >= self.max_model_len:
            raise InputError(
                f"prompt: its {num_prompt} tokens leave no room for an answer in max_model_len={self.max_model_len}; "
                "shorten it"
            )
        if limit > self.max_model_len:
            raise InputError(f"{what} are more than max_model_len={self.max_model_len}; ask for fewer")
        if self.pool.blocks_for(limit - 1) > self.pool.num_blocks:
            room = self.pool.num_blocks * self.pool.block_size
            raise InputError(f"{what} do not fit the cache of {room} tokens; ask for fewer or raise num_blocks")

    def add(self, request: Request, *, limited: bool = True) -> None:
        """Queue a request, or say why it cannot be; `limited` by max_waiting."""
        self.check(request)
        params, limit = request.params, len(request.prompt_token_ids) + request.params.max_tokens
        if request.request_id in self._sequences:
            raise InputError(f"request_id: {request.request_id!r} is in use, or its last step has not been read yet")
        if limited and len(self._waiting) >= self.max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests are waiting (max_waiting={self.max_waiting}); try later")
        sequence = _Sequence(
            request,
            order=(request.priority, self._num_added),
            limit=limit,
            stops=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else request.eos_token_ids),
            salt=f"{self.model}\0{request.cache_salt}",
            tokens=list(request.prompt_token_ids),
        )
        self._hash(sequence)
        insort(self._waiting, sequence, key=_order)
        self._num_added += 1
        self._sequences[request.request_id] = sequence

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; False if it has ended before."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.status is _Status.ENDED:
            return False
        self._end(sequence)
        return True

    def schedule(self) -> Step:
        """The next step: running requests first, then waiting ones; empty if all have to wait for an `update`."""
        step, self._ended = Step(self._num_steps, ended=self._ended), []
        decoding = any(sequence.target - sequence.num_computed == 1 for sequence in self._running)
        chunk = self.max_chunk_beside_decodes if decoding else self.max_num_batched_tokens
        draft = _Draft(step, self.max_num_batched_tokens, chunk, unserved=len(self._running))
        for sequence in tuple(self._running):
            draft.unserved -= 1
            if sequence.status is not _Status.RUNNING:
                continue  # it has just given way to one before it
            if self._decode(sequence, draft):
                continue
            wanted = draft.room(sequence)
            fitting = self._fitting(sequence, wanted)
            while wanted and not fitting and self._running[-1] is not sequence:
                self._preempt(self._running[-1], draft)
                fitting = self._fitting(sequence, wanted)
            if fitting:
                self._place(sequence, fitting, draft)
            draft.claimed += self.pool.blocks_for(sequence.target) - len(sequence.blocks)
        while self._waiting and len(self._running) < self.max_num_seqs and draft.budget and not step.preempted:
            if not self._admit(self._waiting[0], draft):
                break  # nobody overtakes it
        self._num_steps += 1
        self._count(draft)
        self._in_flight.append((step.step_id, draft.flying))
        return step

    def update(self, output: StepOutput) -> list[NewToken]:
        """Take in what the oldest step in flight has sampled; tokens of requests that have ended are left out."""
        step_id, flying = self._in_flight.popleft()
        assert output.step_id == step_id, f"step {step_id} has to be updated before step {output.step_id}"
        new = []
        for sequence, end, samples in flying:
            sequence.in_flight -= 1
            if sequence.status is _Status.ENDED:
                self._free(sequence)
                continue
            if samples:
                token = output.token_ids[sequence.request.request_id]
                sequence.tokens.append(token)
                sequence.num_pending -= 1
                reason = self._finish_reason(sequence)
                new.append(NewToken(sequence.request.request_id, token, reason, sequence.num_cached or 0))
            full = end // self.pool.block_size
            if full > sequence.num_registered and sequence.status is _Status.RUNNING:
                self._register(sequence, full)  # if it was preempted since, these blocks are not its own any more
            if samples and reason is not None:
                self._end(sequence)
        return new

    def assert_consistent(self) -> None:
        """Assert every invariant."""
        sequences = self._sequences.values()
        self.pool.check(Counter(block for sequence in sequences for block in sequence.blocks))
        self.host_pool.check(Counter(block for sequence in sequences for block in sequence.host_blocks))
        assert len(self._running) <= self.max_num_seqs
        for queue, status in ((self._running, _Status.RUNNING), (self._waiting, _Status.WAITING)):
            assert queue == sorted((each for each in sequences if each.status is status), key=_order)
        flying = Counter(id(sequence) for _, step in self._in_flight for sequence, _, _ in step)
        for each in sequences:
            held, running = self.pool.blocks_for(each.num_computed), each.status is _Status.RUNNING
            assert each.in_flight == flying[id(each)]
            assert each.in_flight or each.status is not _Status.ENDED
            assert 0 <= each.num_computed <= each.target
            if each.status is not _Status.ENDED:
                assert (len(each.blocks), len(each.host_blocks)) == ((held, 0) if running else (0, held))

    def _count(self, draft: _Draft) -> None:
        totals, num_tokens = self.totals, self.max_num_batched_tokens - draft.budget
        totals.steps += num_tokens > 0
        totals.prefill_tokens += draft.prefill
        totals.decode_tokens += num_tokens - draft.prefill
        totals.preemptions += len(draft.step.preempted)

    def _fitting(self, sequence: _Sequence, wanted: int) -> int:
        """How many of the wanted tokens fit its blocks and the free ones."""
        room = (len(sequence.blocks) + self.pool.num_free) * self.pool.block_size
        return min(wanted, room - sequence.num_computed)

    def _decode(self, sequence: _Sequence, draft: _Draft) -> bool:
        """Place the one token of a request whose last block has room for it: what nearly all do in nearly all steps."""
        start = sequence.num_computed
        end = start + 1
        if end != len(sequence.tokens) + sequence.num_pending or end >= sequence.limit:
            return False
        if start >= len(sequence.blocks) * self.pool.block_size:
            return False
        sequence.num_computed = end
        sequence.num_pending += 1
        sequence.in_flight += 1
        draft.budget -= 1
        draft.step.sequences.append(ScheduledSequence(sequence.request.request_id, start, 1, True))
        draft.flying.append((sequence, end, True))
        return True

    def _place(self, sequence: _Sequence, count: int, draft: _Draft, *, afresh: bool = False) -> None:
        """Put its next tokens into the step, and count them as computed."""
        start, end = sequence.num_computed, sequence.num_computed + count
        samples = end == len(sequence.tokens) + sequence.num_pending
        request, missing = sequence.request, self.pool.blocks_for(end) - len(sequence.blocks)
        entry = ScheduledSequence(request.request_id, start, count, samples)
        if missing:
            blocks = self.pool.allocate(missing)
            assert blocks is not None
            sequence.blocks += blocks
            entry.new_blocks = tuple(blocks)
        if afresh:
            entry.request, entry.token_ids = request, tuple(sequence.tokens)
            entry.new_blocks = tuple(sequence.blocks)
        sequence.num_computed = end
        sequence.num_pending += samples
        sequence.in_flight += 1
        draft.budget -= count
        if count > 1 or start < len(request.prompt_token_ids):
            draft.prefill += count
        draft.step.sequences.append(entry)
        draft.flying.append((sequence, end, samples))

    def _admit(self, sequence: _Sequence, draft: _Draft) -> bool:
        """Let a request in, or back in, if all its tokens fit beside those of the running ones."""
        if sequence.in_flight:
            return False  # it was preempted, and its last token is not known yet
        most = (len(sequence.tokens) - 1) // self.pool.block_size  # at least one token has to be computed
        if sequence.request.params.prompt_logprobs is not None:
            most = 0  # and here all of them, for their logits
        cached = [] if sequence.host_blocks else self.pool.match(sequence.hashes[:most])
        self.pool.share(cached)
        if self.pool.blocks_for(sequence.target) - len(cached) + draft.claimed > self.pool.num_free:
            self.pool.release(cached)
            return False
        del self._waiting[0]
        insort(self._running, sequence, key=_order)
        sequence.status = _Status.RUNNING
        if sequence.host_blocks:
            self._swap_in(sequence, draft)
        else:
            sequence.blocks, sequence.num_registered = cached, len(cached)
            sequence.num_computed = len(cached) * self.pool.block_size
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
            self.totals.prefix_queries += len(sequence.tokens)
            self.totals.prefix_hits += sequence.num_computed
        self._place(sequence, draft.room(sequence), draft, afresh=True)
        draft.claimed += self.pool.blocks_for(sequence.target) - len(sequence.blocks)
        return True

    def _preempt(self, sequence: _Sequence, draft: _Draft) -> None:
        """Take its blocks; their contents go to host memory if there is room, as copying is faster than computing."""
        host = self.host_pool.allocate(len(sequence.blocks)) if self.host_pool.num_blocks else None
        if host is None:
            sequence.num_computed = 0
        else:
            draft.step.swap_out += zip(sequence.blocks, host, strict=True)
            sequence.host_blocks = host
        draft.step.preempted[sequence.request.request_id] = Preemption.RECOMPUTE if host is None else Preemption.SWAP
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_registered = [], 0
        sequence.status = _Status.WAITING
        self._running.remove(sequence)
        insort(self._waiting, sequence, key=_order)

    def _swap_in(self, sequence: _Sequence, draft: _Draft) -> None:
        blocks = self.pool.allocate(len(sequence.host_blocks))
        assert blocks is not None
        draft.step.swap_in += zip(sequence.host_blocks, blocks, strict=True)
        self.host_pool.release(sequence.host_blocks)
        sequence.blocks, sequence.host_blocks = blocks, []

    def _end(self, sequence: _Sequence) -> None:
        (self._running if sequence.status is _Status.RUNNING else self._waiting).remove(sequence)
        sequence.status = _Status.ENDED
        self._ended.append(sequence.request.request_id)
        self._free(sequence)

    def _free(self, sequence: _Sequence) -> None:
        """Forget an ended request, unless a step in flight still writes to its blocks."""
        if not sequence.in_flight:
            self.pool.release(sequence.blocks)
            self.host_pool.release(sequence.host_blocks)
            del self._sequences[sequence.request.request_id]

    def _finish_reason(self, sequence: _Sequence) -> FinishReason | None:
        num_new = len(sequence.tokens) - len(sequence.request.prompt_token_ids)
        if sequence.tokens[-1] in sequence.stops and num_new > sequence.request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) == sequence.limit else None

    def _hash(self, sequence: _Sequence) -> None:
        if self.pool.enable_prefix_caching:
            block_hashes(sequence.tokens, self.pool.block_size, sequence.salt, sequence.hashes)

    def _register(self, sequence: _Sequence, full: int) -> None:
        """Tell the pool of so many of its blocks, which are full and computed."""
        if self.pool.enable_prefix_caching:
            self._hash(sequence)
            for index in range(sequence.num_registered, full):
                self.pool.register(sequence.blocks[index], sequence.hashes[index])
            sequence.num_registered = full

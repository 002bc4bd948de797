"""Dynamic SplitFuse: which tokens of which requests the next step computes. Pure Python; no tensor is seen here.

There are no phases. A request has tokens and a number of them computed; a step gives each running request its next
tokens out of one budget, then lets waiting ones in with what is left, so a long prompt is chopped and a decode is a
request that misses one token. Requests are ordered by (priority, arrival); where several callers share the steps, by
(priority, rank, arrival), see `outpace.shares`. "First" below means in that order.

Why it cannot deadlock. (1) `add` refuses a request that alone, grown to its end, would not fit the pool. (2) The budget
is at least `max_num_seqs` and one token is kept for each running request, so tokens never run out before requests do.
(3) A running request that finds no block takes those of the last running ones, so the first one needs to wait only
while blocks are held by ended requests of steps in flight, and `update` brings these back: it computes a token in every
step, is never preempted, and ends. (4) Nobody overtakes the first waiting request, and it needs no more than the pool,
so it comes in at the latest when the running ones have ended. Hence by induction over the order every request ends, if
requests of smaller priority do not arrive for ever.

Levels below the device (`outpace.cache.tiers`). A request whose prefix is in host memory comes in as any other, with
its slot and its blocks, and is LOADING until these are copied: it gets no tokens, and keeps its blocks even if it is
aborted meanwhile. A copy never waits for a request, so every load ends: then it is a running request, which can be
preempted. So in (3) the first running request may have to wait for loads too, in (4) the first waiting one for the copy
of its own blocks to host memory, and a step that finds nothing else to do waits for a copy. A request whose prefix is
in files leaves the queue until it is read, once, and comes back to its old place: others come in before it only during
that one read. It holds no blocks of the device meanwhile.

With several callers. (5) The first running request, by rank and arrival, is its caller's first one, so nobody takes its
place, and one that arrives later is not before it. (6) The caller whose clock is furthest behind comes in next; while
it waits its clock stands still and those of callers who are served go on, whoever comes and goes, so its turn comes.
(7) Others may come in before a request that waits for blocks only until they have taken as many as the pool has. (8) A
request that gave way to another caller is not asked again before it has made progress, so that work is not undone for
ever.

With stages (`depth` of them). The first stage cannot read a token that the last one has not chosen, so a request is
held back while a token of it is in flight, and a step has at most its share of those that decode, rounded up: whoever
is served is in flight for the next depth - 1 steps, so within depth steps all are served, and (3) holds for them
together. Chunks of one prompt follow each other in consecutive steps. Tokens come with the step that reads them.

One step ahead. `schedule` may be called again before `update`: tokens in flight are counted though they are not known.
Steps run in order on the device, so the blocks of a preempted request can be given away at once: what was in flight is
written before the next step writes. Those of an ended request are kept until its last step is updated.
"""

from bisect import insort
from collections import Counter, deque

from outpace.cache.block_pool import BlockPool, block_hashes
from outpace.cache.tiers import Tiers
from outpace.errors import ConfigError, InputError, Overloaded
from outpace.sequence import Order, Sequence, Status, order_of
from outpace.shares import Shares
from outpace.step_plan import StepPlan, Totals
from outpace.types import FinishReason, NewToken, Preemption, Request, ScheduledSequence, Step, StepOutput

MAX_CHUNK = 384  # tokens of one prompt beside decodes, unless asked otherwise


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
        depth: int = 1,
        tiers: Tiers | None = None,
        model: str = "",
        totals: Totals | None = None,
    ) -> None:
        """`tiers` are beside the same pool; `model` keeps the prefixes of different models apart; `totals` go on.

        `depth`: stages that a step goes through, so many steps should be in flight.

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
        self.tiers = tiers or Tiers(pool)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_waiting = max_waiting
        self.max_chunk_beside_decodes = chunk
        self.depth = depth
        self.model = model
        self.totals = totals or Totals()
        self._sequences: dict[str, Sequence] = {}
        self._shares = Shares()
        self._contended = False  # several callers share the step that is being put together
        self._queues: dict[Status, list[Sequence]] = {status: [] for status in Status}  # each in order
        self._running = self._queues[Status.RUNNING]
        self._waiting = self._queues[Status.WAITING]
        self._loading = self._queues[Status.LOADING]
        self._awaiting: dict[int, list[Sequence]] = {}  # by the copies that load or read something for them
        self._ended: list[str] = []  # since the last step
        self._in_flight: deque[tuple[int, list[tuple[Sequence, int, bool]], int]] = deque()
        self._num_added = 0
        self._num_steps = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and get tokens in every step."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that are new or were preempted, and those whose blocks are on their way."""
        return len(self._waiting) + len(self._loading) + len(self._queues[Status.FETCHING])

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended or a step has not been updated."""
        return bool(self._sequences or self._in_flight)

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request of that name waits for its first step, or to be taken in again."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and sequence.status not in (Status.RUNNING, Status.ENDED)

    def check(self, request: Request) -> None:
        """Say why a request could never run, if that is so."""
        num_prompt, new = len(request.prompt_token_ids), request.max_tokens
        what = f"max_tokens: {num_prompt} prompt tokens and max_tokens={new}"
        if num_prompt > self.max_model_len or (new and num_prompt == self.max_model_len):
            too_many = "leave no room for an answer in" if new else "are more than"
            raise InputError(
                f"prompt: its {num_prompt} tokens {too_many} max_model_len={self.max_model_len}; shorten it"
            )
        if num_prompt + new > self.max_model_len:
            raise InputError(f"{what} are more than max_model_len={self.max_model_len}; ask for fewer")
        if self.pool.blocks_for(_limit(request) - 1) > self.pool.num_blocks:
            room = self.pool.num_blocks * self.pool.block_size
            raise InputError(f"{what} do not fit the cache of {room} tokens; ask for fewer or raise num_blocks")

    def add(self, request: Request, *, arrival: int | None = None, limited: bool = True) -> int:
        """Queue a request that has passed `check`, or say why not; its arrival. `limited` by max_waiting.

        arrival: that of another request, whose place in the queue this one shares, and whose room in `max_waiting`.
        """
        params = request.params
        if request.request_id in self._sequences:
            raise InputError(f"request_id: {request.request_id!r} is in use, or its last step has not been read yet")
        if limited and arrival is None and self.num_waiting >= self.max_waiting:
            raise Overloaded(f"{self.num_waiting} requests are waiting (max_waiting={self.max_waiting}); try later")
        sequence = Sequence(
            request,
            order=Order(request.priority, self._num_added if arrival is None else arrival, self._num_added),
            limit=_limit(request),
            stops=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else request.eos_token_ids),
            salt=f"{self.model}\0{request.cache_salt}",
            tokens=list(request.prompt_token_ids),
            prompt_only=request.prompt_only,
        )
        self._hash(sequence)
        insort(self._waiting, sequence, key=order_of)
        self._num_added += 1
        self._sequences[request.request_id] = sequence
        self._shares.add(sequence)
        return sequence.order.arrival

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; False if it has ended before."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.status is Status.ENDED:
            return False
        self._end(sequence)
        return True

    def schedule(self) -> Step:
        """The next step: running requests first, then waiting ones; empty if all have to wait for an `update`."""
        step, self._ended = Step(self._num_steps, ended=self._ended), []
        self.tiers.begin(step)
        self._contended = self._shares.contended
        turns = self._shares.turns(self._running) if self._contended else list(self._running)
        plan = StepPlan(step, self.max_num_batched_tokens, *self._chunks(), turns, decodes=self._share())
        plan.claimed = sum(self.pool.blocks_for(each.target) - len(each.blocks) for each in self._loading)
        self._look_at_waiting(plan)
        for sequence in tuple(turns):
            if plan.waiting_rank is not None and plan.waiting_rank < sequence.rank:
                self._let_in(plan, sequence)
            if sequence.status is not Status.RUNNING:
                continue  # it has just given way to one before it
            plan.num_served += 1
            if not self._is_held(sequence, plan) and not self._decode(sequence, plan):
                self._serve(sequence, plan)
        if not step.preempted:
            self._let_in(plan)
        if self._contended:
            self._hand_out_rest(plan)
        idle = not step.sequences and not any(flying for _, flying, _ in self._in_flight)
        step.waits = idle and bool(self._sequences) and self.tiers.num_in_flight > 0
        self._num_steps += 1
        self._count(plan)
        self._in_flight.append((step.step_id, plan.flying, plan.prefill))
        return step

    def update(self, output: StepOutput) -> list[NewToken]:
        """Take in what the oldest step in flight has sampled; tokens of requests that have ended are left out."""
        step_id, flying, prefill = self._in_flight.popleft()
        assert output.step_id == step_id, f"step {step_id} has to be updated before step {output.step_id}"
        for copy_id in self.tiers.take(output.copied):
            self._wake(copy_id)
        new = []
        for sequence, end, samples in flying:
            sequence.in_flight -= 1
            if sequence.status is Status.ENDED:
                self._free(sequence)
                continue
            if samples:
                sequence.num_pending -= 1
                token: int | None = None
                reason: FinishReason | None = FinishReason.LENGTH
                if not sequence.prompt_only:
                    token = output.token_ids[sequence.request.request_id]
                    sequence.tokens.append(token)
                    reason = self._finish_reason(sequence)
                new.append(NewToken(sequence.request.request_id, token, reason, sequence.num_cached or 0))
            full = end // self.pool.block_size
            if full > sequence.num_registered and sequence.status is Status.RUNNING:
                self._register(sequence, full)  # if it was preempted since, these blocks are not its own any more
            if samples and reason is not None:
                self._end(sequence)
        self.totals.iteration_tokens += prefill + sum(each.token_id is not None for each in new)
        return new

    def assert_consistent(self) -> None:
        """Assert every invariant."""
        sequences = self._sequences.values()
        self.pool.check(Counter(block for sequence in sequences for block in sequence.blocks))
        self.tiers.check(Counter(block for each in sequences for block in (*each.host_blocks, *each.fetched_blocks)))
        assert self._num_in <= self.max_num_seqs
        for status, queue in self._queues.items():
            there = (each for each in sequences if each.status is status is not Status.ENDED)
            assert queue == sorted(there, key=order_of)
        flying = Counter(id(sequence) for _, step, _ in self._in_flight for sequence, _, _ in step)
        flying.update(id(each) for awaiting in self._awaiting.values() for each in awaiting if each.blocks)
        assert all(self.tiers.is_in_flight(copy_id) for copy_id in self._awaiting)
        for each in sequences:
            held, holds = self.pool.blocks_for(each.num_computed), each.status in (Status.RUNNING, Status.LOADING)
            assert each.in_flight == flying[id(each)]
            assert each.in_flight or each.status not in (Status.ENDED, Status.LOADING)
            assert 0 <= each.num_computed <= each.target
            if each.status is not Status.ENDED:
                assert (len(each.blocks), len(each.host_blocks)) == ((held, 0) if holds else (0, held))
            if each.status is Status.RUNNING:
                assert not self.tiers.loading(each.blocks)

    @property
    def _num_in(self) -> int:
        """Requests that have a slot."""
        return len(self._running) + len(self._loading)

    def _chunks(self) -> tuple[int, int]:
        """Most tokens of one prompt in the next step: of the part of a caller, and in all."""
        budget, running = self.max_num_batched_tokens, self._running
        decoding = any(sequence.target - sequence.num_computed == 1 for sequence in running)
        longest = self.max_chunk_beside_decodes if decoding else budget
        if not self._contended:
            return longest, longest
        callers = len({each.request.caller for each in running if each.is_prefilling}) + bool(self._waiting)
        return max(1, min(longest, (budget - len(running)) // max(1, callers))), longest

    def _share(self) -> int:
        """How many requests may decode in the next step: as many in each of `depth` steps."""
        if self.depth == 1:
            return self.max_num_seqs
        return -(-sum(not sequence.is_prefilling for sequence in self._running) // self.depth)

    def _is_held(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Whether a running request waits: for its last token, or for the turn of others that decode."""
        if self.depth == 1:
            return False
        if not sequence.num_pending and not sequence.is_prefilling:
            plan.decodes -= 1
        held = sequence.num_pending > 0 or (plan.decodes < 0 and not sequence.is_prefilling)
        if held:  # it keeps its claim on blocks, as if it had been served
            plan.claimed += self.pool.blocks_for(sequence.target) - len(sequence.blocks)
        return held

    def _count(self, plan: StepPlan) -> None:
        totals, num_tokens = self.totals, self.max_num_batched_tokens - plan.budget
        totals.steps += num_tokens > 0
        totals.prefill_tokens += plan.prefill
        totals.decode_tokens += num_tokens - plan.prefill
        totals.preemptions += len(plan.step.preempted)

    def _serve(self, sequence: Sequence, plan: StepPlan) -> None:
        """Give a running request its next tokens; the last ones give way if there are no blocks."""
        wanted = plan.room(sequence)
        fitting = self._fitting(sequence, wanted)
        while wanted and not fitting and plan.turns[-1] is not sequence:
            self._preempt(plan.turns[-1], plan)
            fitting = self._fitting(sequence, wanted)
        if fitting:
            self._place(sequence, fitting, plan)
        plan.claimed += self.pool.blocks_for(sequence.target) - len(sequence.blocks)

    def _look_at_waiting(self, plan: StepPlan) -> None:
        """Find the lowest rank that waits, so that most steps need not look again."""
        ranks = [
            each.rank
            for each in (self._shares.firsts() if self._contended else ())
            if each.request.caller not in plan.refused
        ]
        plan.waiting_rank = min(ranks, default=None)

    def _let_in(self, plan: StepPlan, before: Sequence | None = None) -> None:
        """Let waiting requests in: all that fit, or those that are served before a running one."""
        while self._waiting and plan.budget and (first := self._next(plan, before)) is not None:
            if self._admit(first, plan):
                for each in plan.blocked:
                    each.passed += len(first.blocks)
            elif not self._contended:
                break  # nobody overtakes it
            else:
                plan.refused.add(first.request.caller)
                if self._num_in < self.max_num_seqs:
                    plan.blocked.append(first)
        if self._contended:
            self._look_at_waiting(plan)

    def _next(self, plan: StepPlan, before: Sequence | None) -> Sequence | None:
        """The waiting request whose turn it is. Others may pass one that waits for blocks, but not for ever."""
        if not self._contended:
            return self._waiting[0] if self._num_in < self.max_num_seqs else None
        if any(each.passed >= self.pool.num_blocks for each in plan.blocked):
            return None
        allowed = (each for each in self._shares.firsts() if each.request.caller not in plan.refused)
        return next((each for each in allowed if before is None or each.rank < before.rank), None)

    def _make_room(self, sequence: Sequence, cached: int, plan: StepPlan) -> bool:
        """Whether there are a slot, a token and blocks for it. Requests of a higher rank give way if that is enough."""
        needed = self.pool.blocks_for(sequence.target) - cached + plan.claimed
        later = plan.after(sequence) if self._contended else []
        freed = self.pool.num_freed_by(block for each in later for block in each.blocks) if later else 0
        if needed > self.pool.num_free + freed or self._num_in - len(later) >= self.max_num_seqs:
            return False
        while needed > self.pool.num_free or self._num_in >= self.max_num_seqs or plan.room(sequence) < 1:
            if not later:
                return False
            victim = later.pop()
            victim.gave_way_at = len(victim.tokens)
            self._preempt(victim, plan)
        return True

    def _hand_out_rest(self, plan: StepPlan) -> None:
        """Give what is left of the budget to prompts that had a part of it, in the order of service."""
        for index, (sequence, _, _) in enumerate(plan.flying):
            entry = plan.step.sequences[index]
            missing = min(sequence.target - sequence.num_computed, plan.budget, plan.longest - entry.num_new_tokens)
            if missing > 0 and sequence.status is Status.RUNNING and not entry.samples:
                more = self._fitting(sequence, missing)
                if more > 0:
                    self._extend(index, more, plan)

    def _extend(self, index: int, count: int, plan: StepPlan) -> None:
        """Add tokens to an entry of the step that does not sample yet."""
        entry, sequence = plan.step.sequences[index], plan.flying[index][0]
        end = sequence.num_computed + count
        blocks = self._allocate(self.pool.blocks_for(end) - len(sequence.blocks), plan)
        sequence.blocks += blocks
        entry.new_blocks += tuple(blocks)
        entry.num_new_tokens += count
        entry.samples = end == len(sequence.tokens) + sequence.num_pending
        sequence.num_computed = end
        sequence.num_pending += entry.samples
        plan.budget -= count
        plan.prefill += count
        plan.flying[index] = (sequence, end, entry.samples)
        self._shares.charge(sequence, end)

    def _fitting(self, sequence: Sequence, wanted: int) -> int:
        """How many of the wanted tokens fit its blocks and the free ones."""
        room = (len(sequence.blocks) + self.pool.num_free) * self.pool.block_size
        return min(wanted, room - sequence.num_computed)

    def _decode(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Place the one token of a request whose last block has room for it: what nearly all do in nearly all steps."""
        start = sequence.num_computed
        end = start + 1
        if end != len(sequence.tokens) + sequence.num_pending or end >= sequence.limit or sequence.afresh:
            return False
        if start >= len(sequence.blocks) * self.pool.block_size:
            return False
        sequence.num_computed = end
        sequence.num_pending += 1
        sequence.in_flight += 1
        plan.budget -= 1
        entry = ScheduledSequence(sequence.request.request_id, start, 1, True)
        if self.depth > 1:
            entry.token_ids = (sequence.tokens[start],)
        plan.step.sequences.append(entry)
        plan.flying.append((sequence, end, True))
        if self._contended:
            self._shares.charge(sequence, end)
        return True

    def _place(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        """Put its next tokens into the step, and count them as computed."""
        start, end = sequence.num_computed, sequence.num_computed + count
        samples = end == len(sequence.tokens) + sequence.num_pending
        request, missing = sequence.request, self.pool.blocks_for(end) - len(sequence.blocks)
        entry = ScheduledSequence(request.request_id, start, count, samples)
        if missing:
            blocks = self._allocate(missing, plan)
            sequence.blocks += blocks
            entry.new_blocks = tuple(blocks)
        if sequence.afresh:
            sequence.afresh = False
            entry.request, entry.token_ids = request, tuple(sequence.tokens)
            entry.new_blocks = tuple(sequence.blocks)
        elif self.depth > 1 and end > len(request.prompt_token_ids):
            entry.token_ids = tuple(sequence.tokens[start:end])
        sequence.num_computed = end
        sequence.num_pending += samples
        sequence.in_flight += 1
        plan.budget -= count
        if count > 1 or start < len(request.prompt_token_ids):
            plan.prefill += count
        plan.step.sequences.append(entry)
        plan.flying.append((sequence, end, samples))
        if self._contended:
            self._shares.charge(sequence, end)

    def _allocate(self, count: int, plan: StepPlan) -> list[int]:
        """Blocks that there are, for the step to write to."""
        blocks = self.pool.allocate(count)
        assert blocks is not None
        self.tiers.reuse(blocks, plan.step)
        return blocks

    def _admit(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Let a request in, or back in, if all its tokens fit beside those of the running ones."""
        if sequence.in_flight or sequence.request.request_id in plan.step.preempted:
            return False  # it was preempted: in this step, or its last token is not known yet
        if self.tiers.is_in_flight(sequence.swapping):
            return False  # its blocks are on their way to host memory
        cached, found = self._find(sequence)
        if self._fetch(sequence, cached, found, plan):
            return True
        self.pool.share(cached)
        self.tiers.host.share(found)
        if not self._make_room(sequence, len(cached), plan):
            self.pool.release(cached)
            self.tiers.host.release(found)
            return False
        self._take_blocks(sequence, cached, found, plan)
        sequence.afresh = True
        if not sequence.in_flight:
            self._move(sequence, Status.RUNNING)
            self._place(sequence, plan.room(sequence), plan)
        plan.claimed += self.pool.blocks_for(sequence.target) - len(sequence.blocks)
        return True

    def _find(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Blocks of the device that it can share, and blocks of host memory that follow them."""
        if sequence.host_blocks:
            return [], sequence.host_blocks
        keys = sequence.hashes[: self._most(sequence)]
        cached = self.pool.match(keys)
        return cached, self.tiers.host.match(keys[len(cached) :])

    def _most(self, sequence: Sequence) -> int:
        """Most blocks that it can share: at least one token has to be computed, and of some requests all."""
        return 0 if sequence.request.reads_whole_prompt else (len(sequence.tokens) - 1) // self.pool.block_size

    def _fetch(self, sequence: Sequence, cached: list[int], found: list[int], plan: StepPlan) -> bool:
        """Have it wait for files, once, if they have what comes next."""
        if sequence.host_blocks or sequence.num_fetched_after is not None:
            return False
        start = len(cached) + len(found)
        copy_id = self.tiers.read(found, sequence.hashes[start : self._most(sequence)], plan.step)
        if copy_id is None:
            return False
        sequence.num_fetched_after = start
        self._awaiting.setdefault(copy_id, []).append(sequence)
        self._move(sequence, Status.FETCHING)
        return True

    def _take_blocks(self, sequence: Sequence, cached: list[int], found: list[int], plan: StepPlan) -> None:
        """Give a request that comes in blocks of which it has a reference each; what host memory has is loaded."""
        blocks, loads = self._allocate(len(found), plan), self.tiers.loading(cached)
        if found:
            loads.add(self.tiers.load(found, blocks, plan.step))
        sequence.blocks = cached + blocks
        if sequence.host_blocks:
            self.tiers.host.release(sequence.host_blocks)
            sequence.host_blocks, sequence.swapping = [], None
        else:
            self._let_fetched_go(sequence)
            self._count_hits(sequence, len(cached), len(found))
            for block, key in zip(blocks, sequence.hashes[len(cached) :], strict=False):
                self.pool.register(block, key)  # others that come in now wait for the same load
            sequence.num_registered = len(sequence.blocks)
            sequence.num_computed = len(sequence.blocks) * self.pool.block_size
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
        for copy_id in loads:
            self._awaiting.setdefault(copy_id, []).append(sequence)
        sequence.in_flight += len(loads)
        if loads:
            self._move(sequence, Status.LOADING)

    def _count_hits(self, sequence: Sequence, cached: int, found: int) -> None:
        """Count the tokens that were looked for on each level, and those that were there."""
        totals, size, tokens = self.totals, self.pool.block_size, len(sequence.tokens)
        start = sequence.num_fetched_after
        fetched = 0 if start is None else max(0, cached + found - max(start, cached))
        totals.prefix_queries += tokens
        totals.prefix_hits += (cached + found) * size
        if self.tiers.keep_prefixes:
            totals.tiers.host_queries += tokens - cached * size
            totals.tiers.host_hits += (found - fetched) * size
        if self.tiers.files.num_blocks:
            totals.tiers.file_queries += tokens - (cached + found - fetched) * size
            totals.tiers.file_hits += fetched * size

    def _wake(self, copy_id: int) -> None:
        """Let those go on that waited for a copy."""
        for sequence in self._awaiting.pop(copy_id, ()):
            if sequence.status is Status.FETCHING:
                self._hold_fetched(sequence)
                self._move(sequence, Status.WAITING)
            elif sequence.blocks:
                sequence.in_flight -= 1
                if sequence.status is Status.ENDED:
                    self._free(sequence)
                elif not sequence.in_flight:
                    self._move(sequence, Status.RUNNING)

    def _hold_fetched(self, sequence: Sequence) -> None:
        """Keep what host memory has of its prompt now until it comes in."""
        found = (self.tiers.host.find(key) for key in sequence.hashes[: self._most(sequence)])
        sequence.fetched_blocks = [block for block in found if block is not None]
        self.tiers.host.share(sequence.fetched_blocks)

    def _let_fetched_go(self, sequence: Sequence) -> None:
        self.tiers.host.release(sequence.fetched_blocks)
        sequence.fetched_blocks = []

    def _move(self, sequence: Sequence, status: Status) -> None:
        """Put a request into another queue."""
        was, sequence.status = sequence.status, status
        self._queues[was].remove(sequence)
        insort(self._queues[status], sequence, key=order_of)
        if Status.WAITING in (was, status):
            self._shares.move(sequence)

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Take its blocks; their contents go to host memory if there is room, as copying is faster than computing."""
        kept = self.tiers.swap_out(sequence.blocks, plan.step) if self.tiers.host.num_blocks else None
        if kept is None:
            sequence.num_computed = 0
        else:
            sequence.host_blocks, sequence.swapping = kept
        plan.step.preempted[sequence.request.request_id] = Preemption.RECOMPUTE if kept is None else Preemption.SWAP
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_registered = [], 0
        plan.turns.remove(sequence)
        self._move(sequence, Status.WAITING)

    def _end(self, sequence: Sequence) -> None:
        self._queues[sequence.status].remove(sequence)
        self._shares.remove(sequence)
        sequence.status = Status.ENDED
        self._ended.append(sequence.request.request_id)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Forget an ended request, unless a step in flight still writes to its blocks."""
        if not sequence.in_flight:
            self.pool.release(sequence.blocks)
            self.tiers.host.release(sequence.host_blocks)
            self._let_fetched_go(sequence)
            del self._sequences[sequence.request.request_id]

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        num_new = len(sequence.tokens) - len(sequence.request.prompt_token_ids)
        if sequence.tokens[-1] in sequence.stops and num_new > sequence.request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) == sequence.limit else None

    def _hash(self, sequence: Sequence) -> None:
        if self.pool.enable_prefix_caching:
            block_hashes(sequence.tokens, self.pool.block_size, sequence.salt, sequence.hashes)

    def _register(self, sequence: Sequence, full: int) -> None:
        """Tell the pool of so many of its blocks, which are full and computed."""
        if self.pool.enable_prefix_caching:
            self._hash(sequence)
            for index in range(sequence.num_registered, full):
                self.pool.register(sequence.blocks[index], sequence.hashes[index])
                self.tiers.add_full(sequence.blocks[index], sequence.hashes[index])
            sequence.num_registered = full


def _limit(request: Request) -> int:
    """Most tokens of a request; one that is for the prompt alone ends where others would have their first."""
    return len(request.prompt_token_ids) + max(1, request.max_tokens)

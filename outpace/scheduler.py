"""Dynamic SplitFuse: which tokens of which requests the next step computes. Pure Python, no tensors.

There are no prefill and decode phases. Each request has a number of tokens and a number of computed tokens. A step
has a token budget (`outpace.step_sizes`): running requests get their next tokens from it first, then waiting requests
are admitted with what is left. So a long prompt is computed in chunks, and a decode is a request that lacks one
token.

Requests are ordered by (priority, arrival). When several callers share the steps, the order is (priority, rank,
arrival), see `outpace.shares`. With `longest_first` (offline work) requests with more new tokens go first, within
windows of 4,096 arrivals, so that no request is overtaken by more than that. A request keeps its place in the order
for its whole life, also after a preemption. "First" below means first in this order.

Why the scheduler cannot deadlock:

1. `add` refuses a request that does not fit the block pool alone at its full length.
2. The budget is at least `max_num_seqs` (with `longest_first`: at least the running requests plus one), and one token
   of it is reserved for each running request. So a step runs out of requests before it runs out of tokens.
3. A running request that finds no free block takes the blocks of the last running request. So the first one can only
   wait for blocks of ended requests whose steps are still in flight, and `update` frees these. The first request
   therefore advances in every step, is never preempted, and ends.
4. Nobody overtakes the first waiting request, and it fits the pool, so it is admitted at the latest when all running
   requests have ended. By induction over the order every request ends, unless requests of a smaller priority value
   keep arriving for ever.

With levels below the device (`outpace.cache.tiers`): a request whose prefix is in host memory is admitted as usual,
with its slot and blocks, and is LOADING until they are copied. Until then it gets no tokens, and it keeps its blocks
even if it is aborted. A copy never waits for a request, so every load ends. In (3) the first running request may
therefore also wait for loads; in (4) the first waiting one may wait until its own blocks are copied to host memory; a
step with nothing else to do waits for a copy. A request whose prefix is in files leaves the queue once, while the
files are read, holds no blocks of the device meanwhile, and returns to its old place. Others can overtake it only
during that read.

With several callers:

5. The first running request by (rank, arrival) is its caller's first, so nobody preempts it, and later arrivals rank
   behind it.
6. The caller whose clock is furthest behind is admitted next. While it waits its clock stands still and the clocks of
   served callers advance, so its turn comes.
7. Others may overtake a request that waits for blocks only until they have taken as many blocks as the pool has.
8. A request that gave way to another caller is not preempted for a caller again before it has made progress, so work
   is not repeated for ever.

With pipeline stages (`depth` of them): the first stage needs a token that the last stage has not sampled yet, so a
request is held back while one of its tokens is in flight. A step takes at most 1/depth of the decoding requests,
rounded up. A served request is in flight for the next depth - 1 steps, so all are served within depth steps, and (3)
holds for the depth steps together. Chunks of one prompt follow each other in consecutive steps. The token ids travel
with the step that reads them.

One step ahead: `schedule` may be called again before `update`. Tokens in flight are counted although they are not
known yet. Steps run in order on the device, so the blocks of a preempted request can be given away at once: steps in
flight write before the next step does. Blocks of an ended request are kept until its last step has been updated.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable

from outpace.cache.block_pool import BlockPool
from outpace.cache.tiers import Tiers
from outpace.errors import InputError, Overloaded
from outpace.prefixes import Prefixes
from outpace.sequence import Order, Sequence, Status, order_of
from outpace.shares import Shares
from outpace.step_plan import StepPlan, Totals
from outpace.step_sizes import StepSizes
from outpace.types import FinishReason, Preemption, Request, ScheduledSequence, Step, StepOutput


class Scheduler:
    """Requests in, steps out. Each step, even an empty one, needs one `update`, in order. Not thread-safe."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_waiting: int,
        max_chunk_beside_decodes: int | None = None,
        max_streamed_tokens: int | None = None,
        streamed_chunk: int | None = None,
        longest_first: bool = False,
        padded_sizes: Iterable[int] = (),
        depth: int = 1,
        tiers: Tiers | None = None,
        model: str = "",
        totals: Totals | None = None,
    ) -> None:
        """For the sizes of steps see `StepSizes`.

        depth: number of pipeline stages, and of steps that should be in flight. tiers: levels below the same pool.
        model: salts the prefix hashes, so that models do not share blocks. totals: counters to continue.
        """
        self.sizes = StepSizes.of(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_streamed_tokens=max_streamed_tokens,
            max_chunk_beside_decodes=max_chunk_beside_decodes,
            streamed_chunk=streamed_chunk,
            paced=longest_first and depth == 1,
            padded=tuple(padded_sizes),
        )
        """Limits of a step."""
        self._order = Order.longest_first if longest_first else Order.by_arrival
        self._num_streamed = 0  # streamed requests that have not ended
        self.pool = pool
        self.tiers = tiers or Tiers(pool)
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_waiting = max_waiting
        self.depth = depth
        self.model = model
        self.totals = totals or Totals()
        self._prefixes = Prefixes(pool, self.tiers, self.totals)
        self._sequences: dict[str, Sequence] = {}
        self._shares = Shares()
        self._contended = False  # several callers share the step that is being planned
        self._queues: dict[Status, list[Sequence]] = {status: [] for status in Status}  # each in order
        self._running = self._queues[Status.RUNNING]
        self._waiting = self._queues[Status.WAITING]
        self._loading = self._queues[Status.LOADING]
        self._ended: list[str] = []  # since the last step
        self._in_flight: deque[tuple[int, list[tuple[Sequence, int, bool]], int]] = deque()
        self._num_added = 0
        self._num_steps = 0

    @property
    def max_num_batched_tokens(self) -> int:
        return self.sizes.max_num_batched_tokens

    @property
    def max_chunk_beside_decodes(self) -> int:
        """Most tokens of one prompt in a step with decodes, while a request is streamed or if the user set it."""
        return self.sizes.max_chunk_beside_decodes

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and get tokens."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that are new, preempted, or waiting for their blocks to be copied."""
        return len(self._waiting) + len(self._loading) + len(self._queues[Status.FETCHING])

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended or a step has not been updated."""
        return bool(self._sequences or self._in_flight)

    def is_waiting(self, request_id: str) -> bool:
        """Whether this request waits to be admitted, for the first time or after a preemption."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and sequence.status not in (Status.RUNNING, Status.ENDED)

    def check(self, request: Request) -> None:
        """Raise if a request could never run."""
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
        """Queue a request that has passed `check`; returns its arrival number.

        arrival: the arrival number of an earlier request; both then share one place in the queue and in `max_waiting`.
        limited: whether `max_waiting` applies.
        """
        params = request.params
        if request.request_id in self._sequences:
            raise InputError(f"request_id: {request.request_id!r} is in use, or its last step has not been read yet")
        if limited and arrival is None and self.num_waiting >= self.max_waiting:
            raise Overloaded(f"{self.num_waiting} requests are waiting (max_waiting={self.max_waiting}); try later")
        sequence = Sequence(
            request,
            order=self._order(request, self._num_added if arrival is None else arrival, self._num_added),
            limit=_limit(request),
            stops=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else request.eos_token_ids),
            salt=f"{self.model}\0{request.cache_salt}",
            tokens=list(request.prompt_token_ids),
            prompt_only=request.prompt_only,
        )
        self._prefixes.hash(sequence)
        insort(self._waiting, sequence, key=order_of)
        self._num_added += 1
        self._num_streamed += request.streamed
        self._sequences[request.request_id] = sequence
        self._shares.add(sequence)
        return sequence.order.arrival

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if it had already ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.status is Status.ENDED:
            return False
        self._end(sequence)
        return True

    def schedule(self) -> Step:
        """The next step: running requests first, then waiting ones. It is empty if all must wait for an `update`."""
        step, self._ended = Step(self._num_steps, ended=self._ended), []
        self.tiers.begin(step)
        self._contended = self._shares.contended
        turns = self._shares.turns(self._running) if self._contended else list(self._running)
        tokens = self.sizes.tokens(self._num_streamed)
        if not self._num_streamed and not self._contended:
            tokens = self.sizes.paced_tokens(tokens, self._running, self._waiting)
        plan = StepPlan(step, tokens, *self._chunks(tokens), turns, decodes=self._share())
        plan.claimed = sum(self.pool.blocks_for(each.target) - len(each.blocks) for each in self._loading)
        self._look_at_waiting(plan)
        for sequence in tuple(turns):
            if plan.waiting_rank is not None and plan.waiting_rank < sequence.rank:
                self._let_in(plan, sequence)
            if sequence.status is not Status.RUNNING:
                continue  # it was preempted for one before it
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

    def update(self, output: StepOutput) -> list[tuple[Sequence, FinishReason | None]]:
        """Record what the oldest step in flight sampled.

        Returns the sequences that got a token (prompt-only ones: that are computed), each with the reason if it has
        ended; without those that had ended before.
        """
        step_id, flying, prefill = self._in_flight.popleft()
        assert output.step_id == step_id, f"step {step_id} has to be updated before step {output.step_id}"
        for copy_id in self.tiers.take(output.copied):
            self._wake(copy_id)
        new: list[tuple[Sequence, FinishReason | None]] = []
        for sequence, end, samples in flying:
            sequence.in_flight -= 1
            if sequence.status is Status.ENDED:
                self._free(sequence)
                continue
            if samples:
                sequence.num_pending -= 1
                reason: FinishReason | None = FinishReason.LENGTH
                if not sequence.prompt_only:
                    sequence.tokens.append(output.token_ids[sequence.request.request_id])
                    reason = self._finish_reason(sequence)
                new.append((sequence, reason))
            full = end // self.pool.block_size
            if full > sequence.num_registered and sequence.status is Status.RUNNING:
                self._prefixes.register(sequence, full)  # not if preempted meanwhile: the blocks are no longer its own
            if samples and reason is not None:
                self._end(sequence)
        self.totals.iteration_tokens += prefill + sum(not sequence.prompt_only for sequence, _ in new)
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
        flying.update(id(each) for awaiting in self._prefixes.awaiting.values() for each in awaiting if each.blocks)
        assert all(self.tiers.is_in_flight(copy_id) for copy_id in self._prefixes.awaiting)
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
        return len(self._running) + len(self._loading)

    def _chunks(self, tokens: int) -> tuple[int, int]:
        """Most tokens of one prompt in a step of `tokens`: of its caller's share, and if the budget has tokens left."""
        running = self._running
        longest = self.sizes.chunk(tokens, self._num_streamed, running)
        if not self._contended:
            return longest, longest
        callers = len({each.request.caller for each in running if each.is_prefilling}) + bool(self._waiting)
        return max(1, min(longest, (tokens - len(running)) // max(1, callers))), longest

    def _share(self) -> int:
        """How many requests may decode in the next step, so that `depth` steps have equal shares."""
        if self.depth == 1:
            return self.max_num_seqs
        return -(-sum(not sequence.is_prefilling for sequence in self._running) // self.depth)

    def _is_held(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Whether a running request must wait: its last token is in flight, or the step has its share of decodes."""
        if self.depth == 1:
            return False
        if not sequence.num_pending and not sequence.is_prefilling:
            plan.decodes -= 1
        held = sequence.num_pending > 0 or (plan.decodes < 0 and not sequence.is_prefilling)
        if held:  # it keeps its claim on blocks, as if it had been served
            plan.claimed += self.pool.blocks_for(sequence.target) - len(sequence.blocks)
        return held

    def _count(self, plan: StepPlan) -> None:
        totals, num_tokens = self.totals, plan.size - plan.budget
        totals.steps += num_tokens > 0
        totals.prefill_tokens += plan.prefill
        totals.decode_tokens += num_tokens - plan.prefill
        totals.preemptions += len(plan.step.preempted)

    def _serve(self, sequence: Sequence, plan: StepPlan) -> None:
        """Give a running request its next tokens; preempt the last running ones if blocks are short."""
        wanted = plan.room(sequence)
        fitting = self._fitting(sequence, wanted)
        while wanted and not fitting and plan.turns[-1] is not sequence:
            self._preempt(plan.turns[-1], plan)
            fitting = self._fitting(sequence, wanted)
        if fitting:
            self._place(sequence, fitting, plan)
        plan.claimed += self.pool.blocks_for(sequence.target) - len(sequence.blocks)

    def _look_at_waiting(self, plan: StepPlan) -> None:
        """Find the lowest waiting rank once, so that most steps need not search again."""
        ranks = [
            each.rank
            for each in (self._shares.firsts() if self._contended else ())
            if each.request.caller not in plan.refused
        ]
        plan.waiting_rank = min(ranks, default=None)

    def _let_in(self, plan: StepPlan, before: Sequence | None = None) -> None:
        """Admit waiting requests: all that fit, or only those that rank before a running one."""
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
        """The waiting request to admit next. Others may overtake one that waits for blocks, within a bound."""
        if not self._contended:
            return self._waiting[0] if self._num_in < self.max_num_seqs else None
        if any(each.passed >= self.pool.num_blocks for each in plan.blocked):
            return None
        allowed = (each for each in self._shares.firsts() if each.request.caller not in plan.refused)
        return next((each for each in allowed if before is None or each.rank < before.rank), None)

    def _make_room(self, sequence: Sequence, cached: int, plan: StepPlan) -> bool:
        """Whether it has a slot, a token and blocks; preempts requests of a higher rank if that frees enough."""
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
        """Give the rest of the budget to prompts that got only their caller's share, in order of service."""
        for index, (sequence, _, _) in enumerate(plan.flying):
            entry = plan.step.sequences[index]
            missing = min(sequence.target - sequence.num_computed, plan.budget, plan.longest - entry.num_new_tokens)
            if missing > 0 and sequence.status is Status.RUNNING and not entry.samples:
                more = self._fitting(sequence, missing)
                if more > 0:
                    self._extend(index, more, plan)

    def _extend(self, index: int, count: int, plan: StepPlan) -> None:
        """Add tokens to a sequence that is already in the step and does not sample in it."""
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
        """How many of the wanted tokens fit in its own and the free blocks."""
        room = (len(sequence.blocks) + self.pool.num_free) * self.pool.block_size
        return min(wanted, room - sequence.num_computed)

    def _decode(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Fast path: place one decode token if the last block has room for it."""
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
        """Put its next tokens into the step and count them as computed."""
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
        """Free blocks that the step will write to; the caller has checked that there are enough."""
        blocks = self.pool.allocate(count)
        assert blocks is not None
        self.tiers.reuse(blocks, plan.step)
        return blocks

    def _admit(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Admit a request, new or preempted, if all its tokens fit beside the running ones."""
        if sequence.in_flight or sequence.request.request_id in plan.step.preempted:
            return False  # preempted in this step, or its last token is still in flight
        if self.tiers.is_in_flight(sequence.swapping):
            return False  # its blocks are being copied to host memory
        cached, found = self._prefixes.find(sequence)
        if self._prefixes.read_files(sequence, cached, found, plan.step):
            self._move(sequence, Status.FETCHING)
            return True
        self.pool.share(cached)
        self.tiers.host.share(found)
        if not self._make_room(sequence, len(cached), plan):
            self.pool.release(cached)
            self.tiers.host.release(found)
            return False
        self._prefixes.give(sequence, cached, found, self._allocate(len(found), plan), plan.step)
        sequence.afresh = True
        self._move(sequence, Status.LOADING if sequence.in_flight else Status.RUNNING)
        if not sequence.in_flight:
            self._place(sequence, plan.room(sequence), plan)
        plan.claimed += self.pool.blocks_for(sequence.target) - len(sequence.blocks)
        return True

    def _wake(self, copy_id: int) -> None:
        """Resume the sequences that waited for this copy."""
        for sequence in self._prefixes.awaiting.pop(copy_id, ()):
            if sequence.status is Status.FETCHING:
                self._prefixes.hold_fetched(sequence)
                self._move(sequence, Status.WAITING)
            elif sequence.blocks:
                sequence.in_flight -= 1
                if sequence.status is Status.ENDED:
                    self._free(sequence)
                elif not sequence.in_flight:
                    self._move(sequence, Status.RUNNING)

    def _move(self, sequence: Sequence, status: Status) -> None:
        was, sequence.status = sequence.status, status
        self._queues[was].remove(sequence)
        insort(self._queues[status], sequence, key=order_of)
        if Status.WAITING in (was, status):
            self._shares.move(sequence)

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Free its blocks; swap them to host memory if there is room, since copying is faster than recomputing."""
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
        self._num_streamed -= sequence.request.streamed
        sequence.status = Status.ENDED
        self._ended.append(sequence.request.request_id)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Release an ended request, once no step in flight writes to its blocks."""
        if not sequence.in_flight:
            self.pool.release(sequence.blocks)
            self.tiers.host.release(sequence.host_blocks)
            self._prefixes.let_fetched_go(sequence)
            del self._sequences[sequence.request.request_id]

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        num_new = len(sequence.tokens) - len(sequence.request.prompt_token_ids)
        if sequence.tokens[-1] in sequence.stops and num_new > sequence.request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) == sequence.limit else None


def _limit(request: Request) -> int:
    """Most tokens of a request. A prompt-only request ends where its first new token would be."""
    return len(request.prompt_token_ids) + max(1, request.max_tokens)

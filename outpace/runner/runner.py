"""Runs steps: inputs, forward, choice of tokens. A step is launched, and its result is read later."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from outpace.cache.kv_cache import Pages
from outpace.inject.paged import Batch, BatchModel
from outpace.kernels.dispatch import for_device
from outpace.kernels.ragged import Ragged
from outpace.log import logger
from outpace.runner.capture import on_device
from outpace.runner.copies import Copies
from outpace.runner.deferred import Deferred
from outpace.runner.pooling import PoolingSums
from outpace.runner.prompt_logprobs import PIECE, PromptLogprobs
from outpace.runner.results import Arriving, arriving_logprobs, send_back
from outpace.runner.rows import Header, Layout, Row, Rows
from outpace.runner.step_graphs import FEW, Shape, StepGraphs
from outpace.sampling import Masks, SamplingBatch, sample
from outpace.structured.masks import RowMasks
from outpace.types import Request, Step, StepOutput

PADDED = 256  # large steps without a graph are padded to a multiple of this many tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the largest step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Ran(NamedTuple):
    """Results of a forward on the device, for S sequences. The next step overwrites them."""

    logits: Tensor
    """[S, V] after the last token; with several ranks, each has its part of the vocabulary."""
    likeliest: Tensor
    """[S] greedy tokens, already written to their rows."""
    rows: Tensor
    """[S] row of each sequence."""
    places: Tensor
    """[S] position of the next token in its row."""


class Runner:
    """Runs the scheduler's steps in order. Tokens stay on the device, where the next step reads them."""

    def __init__(
        self,
        model: BatchModel,
        pages: Pages,
        limits: Limits,
        copies: Copies | None = None,
        salt: int = 0,
        graphs_later: Iterable[Shape] = (),
        *,
        pads: bool = False,
    ) -> None:
        """graphs_later: shapes whose graphs are captured when a step first needs them. pads: whether steps larger than
        all graphs are padded too."""
        self._model = model
        self._pages = pages
        self._copies = copies
        self._limits = limits
        self._salt = salt
        self._pads = pads
        self._stage = model.stage
        self._leads = model.ranks.rank == 0 and model.stage.is_last
        """Whether this rank samples and reports tokens; the other ranks run the same steps with it."""
        self._alone = model.ranks.size == model.stage.count == 1
        max_blocks = -(-limits.max_model_len // pages.block_size)
        self.rows = Rows(limits.max_num_seqs, limits.max_model_len, max_blocks, model.device)
        """Tokens and pages of the running requests, on the device."""
        self._sampling: tuple[list[Request], SamplingBatch] | None = None
        self._masks = RowMasks(model.device)
        self._pooling = PoolingSums()
        self._given: Tensor | None = None
        """Hidden states of the previous stage [T, H], always at the same address, so that a graph can read them."""
        if not model.stage.is_first:
            size = limits.max_num_batched_tokens, model.hidden_size
            self._given = torch.zeros(size, dtype=model.dtype, device=model.device)
        self.graphs = StepGraphs(model.device, graphs_later)
        self.deferred = Deferred()
        """Graphs that `catch_up` will capture."""

    @torch.no_grad()
    def catch_up(self, *, idle: bool) -> None:
        """Capture one deferred graph, if it is time for one.

        Call it between steps. idle: no request is waiting. If a capture fails, steps use the graphs there are.
        """
        shape = self.deferred.next() if idle else self.deferred.due()
        if shape is None:
            return
        with on_device(self._model.device):
            self.rows.send(self.rows.take(()), shape.num_seqs, wait=True)  # a step without tokens
            problem = self.graphs.add(shape, self._forward, at_once=not idle)
        if problem is None:
            self.deferred.done(shape)
            logger.debug("cuda graphs: %s is captured, %d are left", shape, len(self.deferred))
        elif idle:
            logger.warning("cuda graphs: %s and those after it are not captured (%s)", shape, problem)
            self.deferred.clear()
        else:
            self.deferred.leave_for_later(shape)

    @torch.no_grad()
    def capture(self, shape: Shape, *, compiled: bool = False) -> bool:
        """Capture a graph for this shape, to which steps are padded from then on; False: capturing failed.

        compiled: steps of each kind have already run, in this or another thread.
        """
        self.rows.send(Layout(), shape.num_seqs, wait=True)  # a step without tokens
        return self.graphs.capture(shape, self._forward, compiled=compiled)

    @torch.no_grad()
    def warm_up(self, shape: Shape) -> Tensor:
        """Run a step of padding without a graph; returns its logits."""
        self.rows.send(Layout(), shape.num_seqs, wait=True)
        return self._forward(shape)[0]

    @torch.no_grad()
    def trial(self, shape: Shape, vocab_size: int) -> Callable[[], Tensor]:
        """A step for timing, with different tokens and no keys to attend to; it may be captured.

        Unlike padding, its tokens give the experts work.
        """
        batch = self._batch(self.rows.send(Layout(), shape.num_seqs, wait=True), shape)
        ids = torch.arange(shape.num_tokens, device=self._model.device) % vocab_size
        # cu_q is a part of the header, which the next step overwrites
        batch = replace(batch, ids=ids, slots=torch.zeros_like(batch.slots), cu_q=batch.cu_q.clone())
        given = self._input(shape.num_tokens)
        return torch.no_grad()(lambda: self._model.forward(batch, self._pages, batch.cu_q[1:], given))

    def reset(self) -> None:
        """Forget all requests. Pages keep their contents."""
        self.rows.clear()
        self._masks.clear()
        self._pooling.clear()
        self._sampling = None
        if self._model.streaming is not None:
            self._model.streaming.restore()  # a step may have failed midway
        if self._copies is not None:
            self._copies.reset()

    @torch.no_grad()
    def launch(self, step: Step) -> Callable[[], StepOutput]:
        """Start a step on the device. Call the result to wait for the output."""
        with on_device(self._model.device):
            return self._launched(step)

    def _launched(self, step: Step) -> Callable[[], StepOutput]:
        self.catch_up(idle=False)
        self._forget(step)
        if self._copies is None:
            return self._compute(step)
        copies = self._copies
        copies.begin(step)
        computed = self._compute(step)
        return lambda: replace(computed(), copied=copies.done(wait=step.waits))

    def _compute(self, step: Step) -> Callable[[], StepOutput]:
        if not step.sequences:
            return lambda: StepOutput(step.step_id, {})
        # Sequences with the most keys first, so that the last ones are short and the SMs finish together.
        sequences = sorted(step.sequences, key=lambda entry: -entry.start)
        layout, prompts = self.rows.take(sequences), PromptLogprobs(raise_later=not self._alone)
        for entry in sequences:
            if entry.request is not None and entry.request.grammar is not None:
                self._masks.begin(entry.request, entry.token_ids)
        if pooled := PoolingSums.wanted(layout):
            return self._launch_pooled(step.step_id, layout, pooled, prompts)
        return self._launch(step.step_id, layout, prompts)

    @torch.no_grad()
    def run(self, step: Step, *, fresh: bool = False) -> Ran:
        """Start a step; the greedy token of each sequence that samples is written to its row.

        fresh: a step of one sequence from its first token uses torch's own attention.
        """
        self.catch_up(idle=False)
        self._forget(step)
        fresh = fresh and len(step.sequences) == 1 and step.sequences[0].start == 0
        return self._run(self.rows.take(step.sequences), fresh=fresh)

    def logits(self, step: Step) -> Tensor:
        """Run a step like `run`; returns the logits [S, V], which the next step may overwrite.

        Only the last stage returns logits.
        """
        return self._model.vocabulary.whole(self.run(step).logits)

    def _launch(self, step_id: int, layout: Layout, prompts: PromptLogprobs) -> Callable[[], StepOutput]:
        wanting = prompts.wanted(layout)
        ran = self._run_in_pieces(layout, wanting, prompts) if wanting else self._run(layout)
        return self._choose(step_id, layout, ran, prompts)

    def _launch_pooled(
        self, step_id: int, layout: Layout, pooled: list[int], prompts: PromptLogprobs
    ) -> Callable[[], StepOutput]:
        """A step with embedding prompts, which run in a separate forward without the head."""
        part = layout.only(pooled)
        shape = Shape.of(len(pooled), part.num_tokens)
        batch = self._batch(self.rows.send(part, len(pooled), wait=True), shape)
        self._take_in(part.num_tokens)
        hidden = self._model.hidden(batch, self._pages, self._input(part.num_tokens))
        self._hand_on(hidden)
        vectors = self._pooling.add(part, hidden)  # only the last stage's are read
        others = sorted(set(range(len(layout.owners))) - set(pooled))
        if not others:
            return lambda: StepOutput(step_id, {}, pooled=vectors.read())
        rest = self._launch(step_id, layout.only(others), prompts)
        return lambda: replace(rest(), pooled=vectors.read())

    def _forget(self, step: Step) -> None:
        self._pooling.forget(step.ended)
        for gone in (step.ended, list(step.preempted)):
            self.rows.forget(gone)
            self._masks.forget(gone)

    def _run(self, layout: Layout, *, wait: bool = False, fresh: bool = False) -> Ran:
        count, run = len(layout.owners), self.graphs.replay
        shape = self.graphs.fitting(count, layout.num_tokens, fresh=fresh)
        if self.deferred:
            self.deferred.note(count, layout.num_tokens, shape)
        if shape is None or (shape not in self.graphs and not self.capture(shape)):
            shape, run = self._shape_without_graph(count, layout.num_tokens, fresh=fresh), self._forward
        elif self._model.streaming is not None:
            self._model.streaming.restore()  # graphs expect the first layers
        header = self.rows.send(layout, shape.num_seqs, wait=wait)
        self._take_in(layout.num_tokens)
        logits, likeliest = run(shape)
        self._hand_on(logits[: layout.num_tokens])
        return Ran(logits[:count], likeliest[:count], header.rows[:count], header.writes[:count])

    def _shape_without_graph(self, count: int, num_tokens: int, *, fresh: bool) -> Shape:
        """The shape of a step without a graph. A large one is padded, because Triton would compile other kernels for
        sizes not divisible by 16."""
        size = min(-(-num_tokens // PADDED) * PADDED, self._limits.max_num_batched_tokens)
        pads = self._pads and not fresh and len(self.graphs) > 0
        if not pads or num_tokens == count or not PADDED < num_tokens <= size:
            return Shape.of(count, num_tokens, fresh=fresh)
        few = min(FEW, self._limits.max_num_seqs)
        return Shape(size, few, "chunks") if count <= few else Shape(size, self._limits.max_num_seqs, "mixed")

    def _forward(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """Run the step whose header is on the device: logits [S, V] and greedy tokens [S]."""
        header = self.rows.header(shape.num_seqs)
        rows = None if shape.kind == "decode" else (header.cu_q[1:] - 1).clamp(min=0)
        logits = self._model.forward(self._batch(header, shape), self._pages, rows, self._input(shape.num_tokens))
        if not self._stage.is_last:
            return logits, header.rows  # hidden states, no tokens
        if self._model.vocabulary.group.size == 1:
            write_likeliest = for_device("write_likeliest", logits.device)
            return logits, write_likeliest(logits, self.rows.state, header.rows, header.writes)
        likeliest = self._model.vocabulary.likeliest(logits)
        self.rows.write(header.rows, header.writes, likeliest)
        return logits, likeliest

    def _input(self, num_tokens: int) -> Tensor | None:
        """The buffer with the previous stage's hidden states; None for the first stage."""
        return None if self._given is None else self._given[:num_tokens]

    def _take_in(self, num_tokens: int) -> None:
        self._stage.link.begin(self._input(num_tokens))

    def _hand_on(self, hidden: Tensor) -> None:
        """Send a step's hidden states to the next stage."""
        self._stage.link.end(None if self._stage.is_last else hidden)

    def _batch(self, header: Header, shape: Shape) -> Batch:
        ragged_inputs = for_device("ragged_inputs", self.rows.tokens.device)
        found: Ragged = ragged_inputs(
            self.rows.tokens, self.rows.table, header.rows, header.starts, header.cu_q,
            shape.num_tokens, self._pages.block_size,
        )  # fmt: skip
        return Batch(
            *found, header.cu_q, max_q=1 if shape.kind == "decode" else shape.num_tokens,
            max_len=self._limits.max_model_len, mixed=shape.kind == "mixed", fresh=shape.kind == "fresh",
        )  # fmt: skip

    def _run_in_pieces(self, layout: Layout, wanting: Sequence[int], prompts: PromptLogprobs) -> Ran:
        """`_run` for steps in which some sequences want the logits of all their tokens: these run alone, in pieces."""
        logits: dict[int, Tensor] = {}
        for index in wanting:
            for piece in layout.pieces(index, PIECE):
                shape = Shape(piece.num_tokens, 1, "chunks")
                batch = self._batch(self.rows.send(piece, 1, wait=True), shape)
                self._take_in(piece.num_tokens)
                found = self._model.forward(batch, self._pages, given=self._input(piece.num_tokens))
                self._hand_on(found)
                whole = self._model.vocabulary.whole(found)
                if self._leads:
                    prompts.add(piece, whole)
                logits[index] = found[-1]
        others = [index for index in range(len(layout.owners)) if index not in logits]
        if others:
            logits.update(zip(others, self._run(layout.only(others), wait=True).logits, strict=False))
        if not self._stage.is_last:
            nothing = torch.empty(0, device=self._model.device)
            return Ran(nothing, nothing, nothing, nothing)
        stacked = torch.stack([logits[index] for index in range(len(layout.owners))])
        header = self.rows.send(layout, len(layout.owners), wait=True)
        likeliest = self._model.vocabulary.likeliest(stacked)
        self.rows.write(header.rows, header.writes, likeliest)
        return Ran(stacked, likeliest, header.rows, header.writes)

    def _choose(self, step_id: int, layout: Layout, ran: Ran, prompts: PromptLogprobs) -> Callable[[], StepOutput]:
        """Sample tokens and start copying them to the host."""
        if not self._stage.is_last:
            return lambda: StepOutput(step_id, {})
        chooses = [
            samples and not owner.request.prompt_only
            for samples, owner in zip(layout.samples, layout.owners, strict=True)
        ]
        picked = [index for index, samples in enumerate(chooses) if samples]
        if all(layout.owners[index].plain for index in picked):  # `_forward` wrote them to the rows
            return self._report_greedy(step_id, layout, picked, ran.likeliest, prompts)
        if len(picked) < len(layout.owners):
            index = torch.tensor(picked, device=ran.logits.device)
            ran = Ran(*(part.index_select(0, index) for part in ran))
        ran = ran._replace(logits=self._model.vocabulary.whole(ran.logits))
        if not self._leads:
            self.rows.write(ran.rows, ran.places, self._model.ranks.from_first(ran.likeliest.clone()))
            return lambda: StepOutput(step_id, {})
        longest = max(layout.starts[index] + layout.counts[index] for index in picked)
        try:
            output, token_ids = self._sample(step_id, [layout.owners[index] for index in picked], longest, ran, prompts)
        except Exception as error:
            if self._alone:
                raise
            output, token_ids = partial(_raise, error), ran.likeliest.clone()  # the other ranks still wait for them
        self.rows.write(ran.rows, ran.places, self._model.ranks.from_first(token_ids))
        return output

    def _report_greedy(
        self, step_id: int, layout: Layout, picked: list[int], likeliest: Tensor, prompts: PromptLogprobs
    ) -> Callable[[], StepOutput]:
        """Start copying the greedy tokens to the host."""
        if not self._leads:
            return lambda: StepOutput(step_id, {})
        requests = [layout.owners[index].request for index in picked]
        arriving = Arriving([likeliest])
        self._masks.chosen(requests, picked, arriving.read)
        return send_back(step_id, requests, arriving, picked, (), prompts.read)

    def _sample(
        self, step_id: int, owners: list[Row], longest: int, ran: Ran, prompts: PromptLogprobs
    ) -> tuple[Callable[[], StepOutput], Tensor]:
        """Sample tokens [S] for these rows and start copying them to the host."""
        requests, vocab_size = [owner.request for owner in owners], ran.logits.shape[1]
        sampling = self._sampling_batch(requests, vocab_size)
        history = self.rows.tokens[:, :longest].index_select(0, ran.rows)
        allowed, failed = self._masks.allowed(requests, vocab_size)
        masks = None if allowed is None else Masks(*allowed)
        sampled = sample(ran.logits, sampling, history, ran.places.long(), masks)
        arriving, places = Arriving([sampled.token_ids]), range(len(owners))
        self._masks.chosen(requests, places, arriving.read)
        details = arriving_logprobs(sampled.token_ids, sampled.logprobs)
        return send_back(step_id, requests, arriving, places, details, prompts.read, failed), sampled.token_ids

    def _sampling_batch(self, requests: list[Request], vocab_size: int) -> SamplingBatch:
        """The sampling parameters as tensors, rebuilt when other requests sample."""
        if self._sampling is None or self._sampling[0] != requests:
            words = [request.bad_words for request in requests]
            batch = SamplingBatch.of(requests, vocab_size, self._model.device, words, salt=self._salt)
            self._sampling = requests, batch
        return self._sampling[1]


def _raise(error: Exception) -> NoReturn:
    raise error

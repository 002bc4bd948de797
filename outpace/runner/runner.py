"""Runs steps: inputs, forward, choice of tokens. A step is launched, and its result read later, when it is there."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from outpace.cache.kv_cache import Pages
from outpace.inject.paged import Batch, BatchModel
from outpace.kernels.ragged import ragged_inputs
from outpace.runner.copies import Copies
from outpace.runner.grammars import Grammars
from outpace.runner.pooling import Pooling
from outpace.runner.prompt_logprobs import PIECE, PromptLogprobs
from outpace.runner.results import Arriving, arriving_logprobs, send_back
from outpace.runner.rows import Header, Layout, Row, Rows
from outpace.runner.step_graphs import Shape, StepGraphs
from outpace.sampling import SamplingBatch, sample
from outpace.types import Request, Step, StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest step there can be."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Ran(NamedTuple):
    """What a forward leaves on the device, for each of S sequences. The next step overwrites it."""

    logits: Tensor
    """[S, V] after the last token; of several ranks, each has those of its own tokens."""
    likeliest: Tensor
    """[S]; in its row already."""
    rows: Tensor
    """[S]"""
    places: Tensor
    """[S] where in its row the next token goes: so many it has now."""


class Runner:
    """Runs the steps of a scheduler, in order. Tokens stay on the device: a step reads what the one before chose."""

    def __init__(
        self,
        model: BatchModel,
        pages: Pages,
        limits: Limits,
        copies: Copies | None = None,
        salt: int = 0,
        graphs_later: Iterable[Shape] = (),
    ) -> None:
        """`graphs_later`: shapes whose graphs are captured when a step first needs them."""
        self._model = model
        self._pages = pages
        self._copies = copies
        self._limits = limits
        self._salt = salt
        self._stage = model.stage
        self._leads = model.ranks.rank == 0 and model.stage.is_last
        """Whether this rank chooses tokens and tells of them; the others run the same steps with it."""
        self._alone = model.ranks.size == model.stage.count == 1
        max_blocks = -(-limits.max_model_len // pages.block_size)
        self.rows = Rows(limits.max_num_seqs, limits.max_model_len, max_blocks, model.device)
        """Tokens and pages of the running requests, on the device."""
        self._sampling: tuple[list[Request], SamplingBatch] | None = None
        self._grammars = Grammars(model.device)
        self._pooling = Pooling()
        self._given: Tensor | None = None
        """What the stage before gives [T, H], always in the same place, so that a graph can read it."""
        if not model.stage.is_first:
            size = limits.max_num_batched_tokens, model.hidden_size
            self._given = torch.zeros(size, dtype=model.dtype, device=model.device)
        self.graphs = StepGraphs(model.device, graphs_later)

    @torch.no_grad()
    def capture(self, shape: Shape, *, compiled: bool = False) -> bool:
        """Capture a graph for this shape, to which steps are padded from then on; False: graphs cannot be had.

        compiled: steps of each kind have run already, in this thread or another.
        """
        self.rows.send(Layout(), shape.num_seqs, wait=True)  # a step without tokens
        return self.graphs.capture(shape, self._forward, compiled=compiled)

    @torch.no_grad()
    def warm_up(self, shape: Shape) -> Tensor:
        """Run a step of padding without a graph; its logits."""
        self.rows.send(Layout(), shape.num_seqs, wait=True)
        return self._forward(shape)[0]

    @torch.no_grad()
    def trial(self, shape: Shape, vocab_size: int) -> Callable[[], Tensor]:
        """A step to be timed, of different tokens that attend to nothing; it may be captured.

        Experts, which pass over padding, have work to do in it.
        """
        batch = self._batch(self.rows.send(Layout(), shape.num_seqs, wait=True), shape)
        ids = torch.arange(shape.num_tokens, device=self._model.device) % vocab_size
        batch = replace(batch, ids=ids, slots=torch.zeros_like(batch.slots))
        given = self._input(shape.num_tokens)
        return torch.no_grad()(lambda: self._model.forward(batch, self._pages, batch.cu_q[1:], given))

    def reset(self) -> None:
        """Forget every request. Pages keep what is in them."""
        self.rows.clear()
        self._grammars.clear()
        self._pooling.clear()
        self._sampling = None
        if self._model.streaming is not None:
            self._model.streaming.restore()  # a step may have failed half-way
        if self._copies is not None:
            self._copies.reset()

    @torch.no_grad()
    def launch(self, step: Step) -> Callable[[], StepOutput]:
        """Start a step on the device. What it returns waits for the output when it is called."""
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
        # Sequences with the most keys first: the last ones to be worked on are short, so that the SMs end together.
        sequences = sorted(step.sequences, key=lambda entry: -entry.start)
        layout, prompts = self.rows.take(sequences), PromptLogprobs(raise_later=not self._alone)
        for entry in sequences:
            if entry.request is not None and entry.request.grammar is not None:
                self._grammars.begin(entry.request, entry.token_ids)
        if pooled := Pooling.wanted(layout):
            return self._launch_pooled(step.step_id, layout, pooled, prompts)
        return self._launch(step.step_id, layout, prompts)

    @torch.no_grad()
    def run(self, step: Step, *, fresh: bool = False) -> Ran:
        """Start a step; the likeliest token of each sequence that samples goes into its row.

        fresh: a step of one sequence from its first token on is computed with torch's own attention.
        """
        self._forget(step)
        fresh = fresh and len(step.sequences) == 1 and step.sequences[0].start == 0
        return self._run(self.rows.take(step.sequences), fresh=fresh)

    def logits(self, step: Step) -> Tensor:
        """Run a step as `run` does; the logits [S, V] of all tokens, which the next step may overwrite.

        Stages before the last give something else.
        """
        return self._model.vocabulary.whole(self.run(step).logits)

    def _launch(self, step_id: int, layout: Layout, prompts: PromptLogprobs) -> Callable[[], StepOutput]:
        wanting = prompts.wanted(layout)
        ran = self._run_in_pieces(layout, wanting, prompts) if wanting else self._run(layout)
        return self._choose(step_id, layout, ran, prompts)

    def _launch_pooled(
        self, step_id: int, layout: Layout, pooled: list[int], prompts: PromptLogprobs
    ) -> Callable[[], StepOutput]:
        """A step with prompts that become vectors: these run in a forward of their own, without a head."""
        part = layout.only(pooled)
        shape = Shape.of(len(pooled), part.num_tokens)
        batch = self._batch(self.rows.send(part, len(pooled), wait=True), shape)
        self._take_in(part.num_tokens)
        hidden = self._model.hidden(batch, self._pages, self._input(part.num_tokens))
        self._hand_on(hidden)
        vectors = self._pooling.add(part, hidden)  # of other stages than the last, nobody reads them
        others = sorted(set(range(len(layout.owners))) - set(pooled))
        if not others:
            return lambda: StepOutput(step_id, {}, pooled=vectors.read())
        rest = self._launch(step_id, layout.only(others), prompts)
        return lambda: replace(rest(), pooled=vectors.read())

    def _forget(self, step: Step) -> None:
        self._pooling.forget(step.ended)
        for gone in (step.ended, list(step.preempted)):
            self.rows.forget(gone)
            self._grammars.forget(gone)

    def _run(self, layout: Layout, *, wait: bool = False, fresh: bool = False) -> Ran:
        count, run = len(layout.owners), self.graphs.replay
        shape = self.graphs.fitting(count, layout.num_tokens, fresh=fresh)
        if shape is None or (shape not in self.graphs and not self.capture(shape)):
            shape, run = Shape.of(count, layout.num_tokens, fresh=fresh), self._forward
        elif self._model.streaming is not None:
            self._model.streaming.restore()  # a graph expects the first layers; a call that failed may have left others
        header = self.rows.send(layout, shape.num_seqs, wait=wait)
        self._take_in(layout.num_tokens)
        logits, likeliest = run(shape)
        self._hand_on(logits[: layout.num_tokens])
        return Ran(logits[:count], likeliest[:count], header.rows[:count], header.writes[:count])

    def _forward(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """The step whose header is on the device: logits [S, V] and likeliest tokens [S]."""
        header = self.rows.header(shape.num_seqs)
        rows = None if shape.kind == "decode" else (header.cu_q[1:] - 1).clamp(min=0)
        logits = self._model.forward(self._batch(header, shape), self._pages, rows, self._input(shape.num_tokens))
        if not self._stage.is_last:
            return logits, header.rows  # hidden states, and no tokens
        likeliest = self._model.vocabulary.likeliest(logits)
        self.rows.write(header.rows, header.writes, likeliest)
        return logits, likeliest

    def _input(self, num_tokens: int) -> Tensor | None:
        """Where the model reads what the stage before gives; None: it is the first."""
        return None if self._given is None else self._given[:num_tokens]

    def _take_in(self, num_tokens: int) -> None:
        """Wait for what the stage before gives of a step."""
        self._stage.link.begin(self._input(num_tokens))

    def _hand_on(self, hidden: Tensor) -> None:
        """Send the stage after what it needs of a step."""
        self._stage.link.end(None if self._stage.is_last else hidden)

    def _batch(self, header: Header, shape: Shape) -> Batch:
        found = ragged_inputs(
            self.rows.tokens, self.rows.table, header.rows, header.starts, header.cu_q,
            shape.num_tokens, self._pages.block_size,
        )  # fmt: skip
        return Batch(
            *found, header.cu_q, max_q=1 if shape.kind == "decode" else shape.num_tokens,
            max_len=self._limits.max_model_len, mixed=shape.kind == "mixed", fresh=shape.kind == "fresh",
        )  # fmt: skip

    def _run_in_pieces(self, layout: Layout, wanting: Sequence[int], prompts: PromptLogprobs) -> Ran:
        """`_run` where some sequences want the logits of all their tokens: those run alone, a piece at a time."""
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
        """Choose tokens for the sequences that sample, and send them on their way to the host."""
        if not self._stage.is_last:
            return lambda: StepOutput(step_id, {})
        chooses = [
            samples and not owner.request.prompt_only
            for samples, owner in zip(layout.samples, layout.owners, strict=True)
        ]
        picked = [index for index, samples in enumerate(chooses) if samples]
        if all(layout.owners[index].plain for index in picked):  # `_forward` has written them into the rows
            return self._tell(step_id, layout, picked, ran.likeliest, prompts)
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
            output, token_ids = partial(_raise, error), ran.likeliest.clone()  # the others wait for them all the same
        self.rows.write(ran.rows, ran.places, self._model.ranks.from_first(token_ids))
        return output

    def _tell(
        self, step_id: int, layout: Layout, picked: list[int], likeliest: Tensor, prompts: PromptLogprobs
    ) -> Callable[[], StepOutput]:
        """Send the likeliest tokens on their way to the host."""
        if not self._leads:
            return lambda: StepOutput(step_id, {})
        requests = [layout.owners[index].request for index in picked]
        arriving = Arriving([likeliest])
        self._grammars.chosen(requests, picked, arriving)
        return send_back(step_id, requests, arriving, picked, (), prompts.read)

    def _sample(
        self, step_id: int, owners: list[Row], longest: int, ran: Ran, prompts: PromptLogprobs
    ) -> tuple[Callable[[], StepOutput], Tensor]:
        """Choose tokens [S] for all these rows, and send them on their way to the host."""
        requests, vocab_size = [owner.request for owner in owners], ran.logits.shape[1]
        sampling = self._sampling_batch(requests, vocab_size)
        history = self.rows.tokens[:, :longest].index_select(0, ran.rows)
        masks, failed = self._grammars.masks(owners, vocab_size)
        sampled = sample(ran.logits, sampling, history, ran.places.long(), masks)
        arriving, places = Arriving([sampled.token_ids]), range(len(owners))
        self._grammars.chosen(requests, places, arriving)
        details = arriving_logprobs(sampled.token_ids, sampled.logprobs)
        return send_back(step_id, requests, arriving, places, details, prompts.read, failed), sampled.token_ids

    def _sampling_batch(self, requests: list[Request], vocab_size: int) -> SamplingBatch:
        """Made again when other requests sample."""
        if self._sampling is None or self._sampling[0] != requests:
            words = [request.bad_words for request in requests]
            batch = SamplingBatch.of(requests, vocab_size, self._model.device, words, salt=self._salt)
            self._sampling = requests, batch
        return self._sampling[1]


def _raise(error: Exception) -> NoReturn:
    raise error

"""Runs windows of a text through `LLM`: the loss of every token, and the figures for the agreement of two models."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.errors import InputError, ModelError
from outpace.llm import LLM
from outpace.loading.dtypes import short
from outpace.loading.windows import TextTokens, Window

CHUNK_BYTES = 2**26
"""Size of the fp32 log-probabilities on the device at a time."""
HOST_BYTES = 2**30
"""Default size of the reference's distributions, which are kept in host memory."""
KEPT = 1024
"""Likeliest tokens kept per position if the whole vocabulary does not fit."""

AT_ONCE = 16
"""Windows in the engine at a time; overlapping windows have many times the text's tokens."""

Progress = Callable[[int, int], None]
"""Called with the number of tokens done, and the number of all tokens."""


class Distributions:
    """Next-token distributions of a reference, in at most `limit` bytes of host memory.

    Log-probabilities of the whole vocabulary if they fit, else of the likeliest tokens, with all others counted as one.
    Joining tokens can only lower a KL divergence, so the result is a lower bound.
    """

    def __init__(self, rows: int, limit: int = HOST_BYTES) -> None:
        self._rows, self._limit = rows, limit
        self._logprobs: Tensor | None = None  # [rows, kept] fp32
        self._ids: Tensor | None = None  # [rows, kept] int32; None: all, in order
        self.vocab_size = 0

    @property
    def kept(self) -> int:
        """Tokens kept per position."""
        return 0 if self._logprobs is None else self._logprobs.shape[1]

    @property
    def exact(self) -> bool:
        """Whether that is the whole vocabulary."""
        return self._ids is None

    def keep(self, place: int, logprobs: Tensor) -> None:
        """Keep the log-probabilities [R, V] of positions `place` and following."""
        if self._logprobs is None:
            self._allocate(logprobs.shape[1])
        assert self._logprobs is not None
        rows = slice(place, place + len(logprobs))
        if self._ids is None:
            self._logprobs[rows] = logprobs.cpu()
        else:
            values, ids = logprobs.topk(self.kept, dim=1)
            self._logprobs[rows], self._ids[rows] = values.cpu(), ids.int().cpu()

    def divergence(self, place: int, logprobs: Tensor) -> Tensor:
        """KL divergence of log-probabilities [R, V] from those that are kept, [R] in nats."""
        if self._logprobs is None or logprobs.shape[1] != self.vocab_size:
            raise InputError(
                f"against: its vocabulary has {self.vocab_size} tokens and the model's {logprobs.shape[1]}; "
                "evaluate each alone, and compare their bits per byte"
            )
        rows = slice(place, place + len(logprobs))
        known = self._logprobs[rows].to(logprobs.device)
        if self._ids is None:
            return _divergence(known, logprobs)
        others = logprobs.gather(1, self._ids[rows].to(logprobs.device).long())
        return _divergence(_with_rest(known), _with_rest(others))

    def _allocate(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        if 4 * self._rows * vocab_size <= self._limit:
            self._logprobs = torch.empty(self._rows, vocab_size)
            return
        kept = max(1, min(KEPT, vocab_size, self._limit // (8 * self._rows)))
        self._logprobs = torch.empty(self._rows, kept)
        self._ids = torch.empty(self._rows, kept, dtype=torch.int32)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Log-probabilities [R, K], with all other tokens together as one more column."""
    rest = 1 - logprobs.double().exp().sum(1, keepdim=True)
    return torch.cat([logprobs, rest.clamp(min=1e-9).log().float()], dim=1)


def _divergence(known: Tensor, other: Tensor) -> Tensor:
    """Sum of p (log p - log q) over the columns; tokens of probability 0 add nothing."""
    terms = torch.where(known == -torch.inf, 0.0, known.exp() * (known - other))
    return terms.sum(1, dtype=torch.float64).clamp(min=0)  # rounding can give slightly negative sums


@dataclass
class Scores:
    """The results at each of the tokens that count."""

    nats: Tensor
    """[T] -log p of the token, float64."""
    likeliest: Tensor
    """[T] token with the largest logit."""
    divergence: Tensor | None = None
    """[T] KL divergence from the reference, if there is one."""


@dataclass
class _Watch:
    """Receives the logits of windows while the steps run."""

    tokens: TextTokens
    scores: Scores
    keep: Distributions | None
    reference: Distributions | None
    progress: Progress
    windows: Sequence[Window] = ()
    """The windows that run now."""
    done: int = 0
    failed: Exception | None = None

    def __call__(self, index: int, position: int, logits: Tensor) -> None:
        """Row i of logits predicts the token at `position + i` of window `index`."""
        if self.failed is None:
            try:
                self._take(self.windows[index], position, logits)
            except InputError as error:  # raised after the run: an error in a step would fail all requests
                self.failed = error

    def _take(self, window: Window, position: int, logits: Tensor) -> None:
        skipped, ids = max(0, window.first - position), self.tokens.of(window)
        position, logits = position + skipped, logits[skipped:]
        for start, logprobs in _in_chunks(logits):
            at = position + start
            place, rows = window.place + at - window.first, len(logprobs)
            targets = torch.tensor(ids[at : at + rows], device=logits.device)
            self.scores.nats[place : place + rows] = -logprobs.gather(1, targets[:, None])[:, 0].double().cpu()
            self.scores.likeliest[place : place + rows] = logprobs.argmax(1).cpu()
            if self.keep is not None:
                self.keep.keep(place, logprobs)
            if self.reference is not None and self.scores.divergence is not None:
                self.scores.divergence[place : place + rows] = self.reference.divergence(place, logprobs).cpu()
            self.done = min(self.done + rows, len(self.scores.nats))  # a preempted request computes its rows again
            self.progress(self.done, len(self.scores.nats))


def _in_chunks(logits: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Log-probabilities in fp32, some rows at a time."""
    rows = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
    for start in range(0, len(logits), rows):
        yield start, logits[start : start + rows].log_softmax(dim=1, dtype=torch.float32)


def score(
    llm: LLM,
    tokens: TextTokens,
    windows: Sequence[Window],
    *,
    keep: Distributions | None = None,
    reference: Distributions | None = None,
    progress: Progress = lambda done, total: None,
) -> Scores:
    """Run the windows and score every token that counts.

    keep: filled with the model's distributions; reference: distributions of another model to compare with.
    """
    total = sum(window.tokens for window in windows)
    scores = Scores(
        nats=torch.full((total,), torch.nan, dtype=torch.float64),
        likeliest=torch.zeros(total, dtype=torch.long),
        divergence=None if reference is None else torch.zeros(total, dtype=torch.float64),
    )
    watch = _Watch(tokens, scores, keep, reference, progress)
    progress(0, total)
    for start in range(0, len(windows), AT_ONCE):
        watch.windows = windows[start : start + AT_ONCE]
        llm.prompt_logits([tokens.of(window) for window in watch.windows], watch, use_tqdm=False)
        if watch.failed is not None:
            raise watch.failed
        last = watch.windows[-1]
        _check_finite(llm, scores.nats[: last.place + last.tokens])
    return scores


def _check_finite(llm: LLM, nats: Tensor) -> None:
    wrong = (~nats.isfinite()).nonzero()
    if len(wrong):
        raise ModelError(
            f"model: {llm.name} in {short(llm.dtype)} gives NaN or infinite losses at {len(wrong)} of {len(nats)} "
            f"tokens (first at token {int(wrong[0]) + 1}); use another dtype, or check its weights"
        )

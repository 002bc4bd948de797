"""RaggedEngine: the runtime without the scheduler, for callers that schedule; methods have FastGen's names."""

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from outpace.cache.block_pool import BlockPool
from outpace.config import ConfigLike, LLMConfig
from outpace.errors import ConfigError, InputError
from outpace.ranks.leader import let_go, load_ranked, starting
from outpace.runner.start import start_runner
from outpace.types import Request, ScheduledSequence, Step, check_vocabulary


class SchedulingResult(IntEnum):
    """Whether a batch can run, or which limit it exceeds; numbers are FastGen's."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    BatchSequenceLimitExceeded = 2
    BatchTokenLimitExceeded = 3
    KVCacheLimitExceeded = 4
    SequenceTokenLimitExceeded = 5


_REMEDIES = {
    SchedulingResult.EngineSequenceLimitExceeded: "flush a sequence, or raise max_num_seqs",
    SchedulingResult.BatchSequenceLimitExceeded: "put fewer sequences at a time, or raise max_num_seqs",
    SchedulingResult.BatchTokenLimitExceeded: "put fewer tokens at a time, or raise max_num_batched_tokens",
    SchedulingResult.KVCacheLimitExceeded: "flush a sequence, or raise num_blocks",
    SchedulingResult.SequenceTokenLimitExceeded: "a sequence would be longer than max_model_len",
}


class SchedulingError(InputError, RuntimeError):
    """A batch that does not fit, and why."""

    def __init__(self, result: SchedulingResult) -> None:
        super().__init__(f"put: {result.name}; {_REMEDIES[result]}")
        self.result = result


@dataclass
class _Tracked:
    """A sequence with keys and values in the cache."""

    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)


class RaggedEngine:
    """Runs batches of pieces of sequences and returns logits. Options are those of `LLM` without its scheduler's.

    After an error in `put` the sequences of its batch are flushed.
    """

    def __init__(
        self, model: str | os.PathLike[str] | nn.Module | None = None, *, config: ConfigLike = None, **options: Any
    ) -> None:
        asked = LLMConfig.of(config, **options)
        _refuse_scheduling(asked)
        parts, self._ranks = load_ranked(model, asked)
        with starting(self._ranks, parts.streaming):
            started = start_runner(parts.model, parts.config, parts.max_model_len)
        self.close = weakref.finalize(self, let_go, self._ranks, parts.streaming)
        """Ends the other ranks and the streaming of layers; so does garbage collection of the engine."""
        self._runner, self._limits = started.runner, started.limits
        self._vocab_size = parts.vocab_size
        self._pool = BlockPool(started.num_blocks, parts.config.cache.block_size, enable_prefix_caching=False)
        self._sequences: dict[int, _Tracked] = {}
        self._flushed: list[str] = []
        self._num_steps = 0

    @property
    def free_blocks(self) -> Tensor:
        """Number of free pages, [n_kv_cache_groups]."""
        return torch.tensor([self._pool.num_free])

    @property
    def n_kv_cache_groups(self) -> int:
        """Kinds of pages: all layers have the same."""
        return 1

    def put(
        self,
        batch_uids: Sequence[int | Tensor] | Tensor,
        batch_tokens: Iterable[Sequence[int] | Tensor],
        do_checks: bool = True,
    ) -> Tensor:
        """Run the next tokens of each sequence; a new uid starts one. Returns logits [n, V] after each last token.

        do_checks=False skips the check of token ids. A batch that does not fit raises `SchedulingError` in any case.
        """
        uids, pieces = _uids(batch_uids), list(batch_tokens)
        if len(uids) != len(pieces):
            raise InputError(f"batch_tokens: {len(pieces)} pieces for {len(uids)} uids; give one for each")
        batch = [(uid, _token_list(tokens, check=do_checks)) for uid, tokens in zip(uids, pieces, strict=True)]
        self._check(batch, ids=do_checks)
        result = self.can_schedule(uids, [len(tokens) for _, tokens in batch])
        if result is not SchedulingResult.Success:
            raise SchedulingError(result)
        self._num_steps += 1
        step = Step(self._num_steps, ended=self._flushed)
        self._flushed = []
        try:
            for uid, tokens in batch:
                step.sequences.append(self._entry(uid, tokens))
            with self._ranks.together():
                self._ranks.launch(step, for_logits=True)
                logits = self._runner.logits(step).clone()
            self._ranks.check()
            return logits
        except BaseException:  # it is unknown how much was computed, so these sequences must start again
            for uid in uids:
                if uid in self._sequences:
                    self.flush(uid)
            raise

    def query(self, uid: int, max_request_tokens: int | Tensor, max_request_blocks: int | Tensor) -> tuple[int, int]:
        """(tokens, new pages) that a sequence can get, at most these numbers."""
        (max_request_tokens,) = _counts("max_request_tokens", [max_request_tokens])
        (max_request_blocks,) = _counts("max_request_blocks", [max_request_blocks])
        tracked = self._sequences.get(uid, _Tracked())
        size, held = self._pool.block_size, len(tracked.blocks)
        fitting = (held + max_request_blocks) * size - tracked.num_tokens
        tokens = min(max_request_tokens, fitting, self._limits.max_model_len - tracked.num_tokens)
        return tokens, max(0, self._pool.blocks_for(tracked.num_tokens + tokens) - held)

    def can_schedule(
        self, uids: Sequence[int | Tensor] | Tensor, lengths: Sequence[int | Tensor] | Tensor
    ) -> SchedulingResult:
        """Whether `put` could run these numbers of tokens of these sequences."""
        uids, lengths = _uids(uids), _counts("lengths", lengths)
        if len(uids) != len(lengths):
            raise InputError(f"lengths: {len(lengths)} for {len(uids)} uids; give one for each")
        new = [uid for uid in uids if uid not in self._sequences]
        if len(uids) > self._limits.max_num_seqs:
            return SchedulingResult.BatchSequenceLimitExceeded
        if len(self._sequences) + len(new) > self._limits.max_num_seqs:
            return SchedulingResult.EngineSequenceLimitExceeded
        if sum(lengths) > self._limits.max_num_batched_tokens:
            return SchedulingResult.BatchTokenLimitExceeded
        blocks = 0
        for uid, length in zip(uids, lengths, strict=True):
            tracked = self._sequences.get(uid, _Tracked())
            if tracked.num_tokens + length > self._limits.max_model_len:
                return SchedulingResult.SequenceTokenLimitExceeded
            blocks += max(0, self._pool.blocks_for(tracked.num_tokens + length) - len(tracked.blocks))
        return SchedulingResult.KVCacheLimitExceeded if blocks > self._pool.num_free else SchedulingResult.Success

    def get_remaining_block_capacity(self, uid: int) -> int:
        """Tokens that the pages of a sequence still have room for."""
        tracked = self._sequences.get(uid, _Tracked())
        return len(tracked.blocks) * self._pool.block_size - tracked.num_tokens

    def flush(self, uid: int) -> None:
        """Forget a sequence and free its pages."""
        tracked = self._sequences.pop(uid, None)
        if tracked is None:
            raise InputError(f"uid: {uid} is not a sequence of this engine")
        self._pool.release(tracked.blocks)
        self._flushed.append(str(uid))

    def _check(self, batch: list[tuple[int, list[int]]], *, ids: bool) -> None:
        """Refuse an invalid batch; `ids`: check every token id too."""
        uids = [uid for uid, _ in batch]
        if not batch or len(set(uids)) < len(uids):
            raise InputError(f"batch_uids: expected one or more, each once, got {uids!r:.80}")
        for uid, tokens in batch:
            if not tokens:
                raise InputError(f"batch_tokens: expected one or more token ids for uid {uid}")
            if ids:
                check_vocabulary(f"batch_tokens: uid {uid}", self._vocab_size, min(tokens), max(tokens))

    def _entry(self, uid: int, tokens: list[int]) -> ScheduledSequence:
        """The next tokens of a sequence, with the pages they need."""
        request = None if uid in self._sequences else Request(request_id=str(uid), prompt_token_ids=tuple(tokens))
        tracked = self._sequences.setdefault(uid, _Tracked())
        start, end = tracked.num_tokens, tracked.num_tokens + len(tokens)
        blocks = self._pool.allocate(self._pool.blocks_for(end) - len(tracked.blocks))
        assert blocks is not None, "checked before"
        tracked.blocks += blocks
        tracked.num_tokens = end
        return ScheduledSequence(
            str(uid), start, len(tokens), False, new_blocks=tuple(blocks), request=request, token_ids=tuple(tokens)
        )


def _refuse_scheduling(config: LLMConfig) -> None:
    """Refuse options of the scheduler, because they would have no effect here."""
    default = LLMConfig()
    for section, names in _SCHEDULES.items():
        for name in names:
            part, usual = (getattr(each, section) if section else each for each in (config, default))
            if getattr(part, name) != getattr(usual, name):
                raise ConfigError(f"{name}: this engine has no scheduler; remove it, or use LLM")


_SCHEDULES = {
    "scheduler": ("max_waiting", "max_chunk_beside_decodes", "target_step_ms", "policy", "async_scheduling"),
    "cache": ("swap_space", "enable_prefix_caching"),
    "offload": ("kv", "kv_offloading_size", "kv_files"),
    "": ("seed",),
}


def _uids(given: object) -> list[int]:
    found = _plain(given)
    if not isinstance(found, list) or not all(type(uid) is int for uid in found):
        raise InputError(f"batch_uids: expected a list of integers, got {given!r:.80}")
    return found


def _counts(name: str, given: object) -> list[int]:
    found = _plain(given)
    if not isinstance(found, list) or not all(type(count) is int and count >= 0 for count in found):
        raise InputError(f"{name}: expected integers from 0, got {given!r:.80}")
    return found


def _plain(given: object) -> object:
    """A tensor, or a sequence with tensors of one number, as a list of numbers."""
    if isinstance(given, Tensor):
        return given.flatten().tolist()
    if not isinstance(given, list | tuple):
        return given
    return [each.item() if isinstance(each, Tensor) and each.numel() == 1 else each for each in given]


def _token_list(tokens: Sequence[int] | Tensor, *, check: bool) -> list[int]:
    found = tokens.flatten().tolist() if isinstance(tokens, Tensor) else tokens
    if not isinstance(found, list | tuple) or (check and not all(type(token) is int for token in found)):
        raise InputError(f"batch_tokens: expected token ids, got {found!r:.80}")
    return list(found)

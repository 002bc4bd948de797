"""Samples the next tokens of a batch, each request with its own parameters, without waiting for the device.

The parameters of a set of requests are tensors that are made once (`SamplingBatch.of`), and everything that changes
from step to step is computed on the device from the tokens so far. The order is vLLM's: allowed tokens, bad words,
min_tokens, bias, penalties, grammars, then temperature, min_p, top_k and top_p (`kernels.draw`). A token depends only
on its own request: its seed, its parameters, its tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels.dispatch import for_device
from outpace.kernels.draw import Drawing
from outpace.types import Request, SamplingParams

BANNED = -1e30
"""Added to the logit of a banned token. It is finite, so that a row whose allowed tokens are all banned draws one."""
_FOREVER = 2**62
_CHUNK_BYTES = 2**28  # fp32 memory for log-probabilities at a time
FEW_LOGPROBS = 20
"""Rows that want at most this many are computed together; rows that want more are separate, not to slow them."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities by the model's unchanged logits: of a token and of K others, the likeliest or the requested."""

    token_logprobs: Tensor  # [S] fp32
    token_ranks: Tensor  # [S] int64, 1 + how many logits are larger
    top_ids: Tensor  # [S, K] int64, likeliest first, or in the requested order
    top_logprobs: Tensor  # [S, K] fp32
    top_ranks: Tensor | None = None  # [S, K] int64 of requested tokens; None: the likeliest, in order


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of `sample`."""

    token_ids: Tensor  # [S] int64
    logprobs: "tuple[tuple[LogprobRows, Logprobs], ...]" = ()


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows of a batch whose log-probabilities are computed together."""

    places: tuple[int, ...]
    rows: Tensor | None  # [R] int64, the same on the device; None: all rows in their order
    num: int  # the most that any of them wants
    token_ids: Tensor | None = None  # [R, K] int64, requested tokens, instead of the likeliest


@dataclass(frozen=True, slots=True)
class Masks:
    """Tokens that grammars allow in this step."""

    rows: Tensor  # [R] int64, rows of the batch
    bits: Tensor  # [R, ceil(V / 32)] int32; token t is bit t % 32 of word t // 32


@dataclass(frozen=True, slots=True)
class _Bans:
    """Tokens that are banned while fewer than `until` are generated. All [N]; places are row * V + token."""

    rows: Tensor
    places: Tensor
    until: Tensor


@dataclass(frozen=True, slots=True)
class _Words:
    """Tokens that are banned after a prefix: the last tokens of bad words."""

    rows: Tensor  # [N]
    places: Tensor  # [N]
    sizes: Tensor  # [N], tokens of the prefix
    prefixes: Tensor  # [N, P], at the right end; -1 in front


@dataclass(frozen=True, slots=True)
class _Penalties:
    """The rows with penalties, and their penalties."""

    vocab_size: int
    rows: Tensor  # [R]
    starts: Tensor  # [R, 1], row * V
    prompt_lengths: Tensor  # [R, 1]
    repetition: Tensor  # [R, 1]
    presence: Tensor  # [R, 1]
    frequency: Tensor  # [R, 1]


@dataclass(frozen=True, slots=True)
class _Edits:
    """Changes that turn logits into scores; at least one of them is set."""

    disallowed: Tensor | None  # [S, V] bool
    biases: tuple[Tensor, Tensor] | None  # places [N], values [N] fp32
    bans: _Bans | None
    words: _Words | None
    penalties: _Penalties | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Parameters of the sampled rows of a step as tensors; made again only when the set of requests changes."""

    vocab_size: int
    logprobs: tuple[LogprobRows, ...]
    """Rows that want log-probabilities."""
    argmax: bool
    """Every row takes its highest score (scores may differ from logits)."""
    filtered: bool
    """Some row has top_k or top_p."""
    prompt_lengths: Tensor  # [S] int64
    temperature: Tensor  # [S] fp32; 0 is argmax
    top_k: Tensor  # [S] int64; 0 is all
    top_p: Tensor  # [S] fp32
    min_p: Tensor  # [S] fp32
    keys: Tensor  # [S] int64, of the random numbers
    edits: _Edits | None

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        vocab_size: int,
        device: torch.device,
        bad_words: Sequence[Sequence[Sequence[int]]] | None = None,
        *,
        salt: int = 0,
    ) -> "SamplingBatch":
        """Put the parameters on the device. bad_words: token sequences of each request's bad words; salt: a random
        number of the process, from which requests without a seed get theirs."""
        params = [request.params for request in requests]
        heat = [0.0 if each.top_k == 1 else each.temperature for each in params]
        top_k = [each.top_k if each.top_k < vocab_size else 0 for each in params]
        floats = [heat, [each.top_p for each in params], [each.min_p for each in params]]
        ints = [[len(each.prompt_token_ids) for each in requests], top_k, [_key(each, salt) for each in requests]]
        temperature, top_p, min_p = _upload_rows(floats, torch.float32, device)
        prompt_lengths, top_ks, keys = _upload_rows(ints, torch.int64, device)
        wanted = _logprob_rows(params, vocab_size, device)
        edits = _edits(requests, bad_words, vocab_size, device)
        return cls(
            vocab_size=vocab_size,
            logprobs=wanted,
            argmax=not any(heat),
            filtered=any(h > 0 and (k > 0 or each.top_p < 1) for h, k, each in zip(heat, top_k, params, strict=True)),
            prompt_lengths=prompt_lengths,
            temperature=temperature,
            top_k=top_ks,
            top_p=top_p,
            min_p=min_p,
            keys=keys,
            edits=edits,
        )


def is_plain(request: Request) -> bool:
    """Whether its tokens are the argmax of the unchanged logits, without log-probabilities."""
    params = request.params
    penalized = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    ends = params.stop_token_ids or (request.eos_token_ids and not params.ignore_eos)
    edited = request.bad_words or params.logit_bias or params.allowed_token_ids or (params.min_tokens and ends)
    if penalized or edited or params.wants_logprobs or request.grammar is not None:
        return False
    return params.temperature == 0 or params.top_k == 1


def sample(
    logits: Tensor, batch: SamplingBatch, history: Tensor, lengths: Tensor, masks: Masks | None = None
) -> Sampled:
    """The next token of each row. Nothing here waits for the device.

    logits: [S, V], not modified; history: [S, L] int32, the tokens of each request so far, prompt then answer;
    lengths: [S] int64, the number of these tokens; masks: for the rows with a grammar.
    """
    assert logits.shape == (len(batch.keys), batch.vocab_size), f"{tuple(logits.shape)} for another batch"
    assert len(history) == len(lengths) == len(logits)
    generated = lengths - batch.prompt_lengths
    scores = logits
    if batch.edits is not None or masks is not None:
        scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if batch.edits is not None:
        _edit(scores, batch.edits, history, lengths, generated)
    if masks is not None:
        _mask(scores, masks)
    if batch.argmax:
        tokens = scores.argmax(dim=1)
    else:
        how = Drawing(batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.keys, generated)
        tokens = for_device("draw", logits.device)(scores, how, filtered=batch.filtered)
    return Sampled(tokens, tuple((wanted, _logprobs_of_rows(logits, tokens, wanted)) for wanted in batch.logprobs))


def logprobs_of(logits: Tensor, token_ids: Tensor, num: int, others: Tensor | None = None) -> Logprobs:
    """Log-probabilities of tokens [S] by logits [S, V], and of the `num` likeliest (-1: all), or of `others` [S, K].

    Computed in chunks of rows, since each row takes two fp32 copies.
    """
    rows = max(1, _CHUNK_BYTES // (2 * 4 * logits.shape[1]))
    parts = []
    for start in range(0, max(1, len(logits)), rows):
        some = slice(start, start + rows)
        parts.append(_logprobs(logits[some], token_ids[some], num, None if others is None else others[some]))
    if len(parts) == 1:
        return Logprobs(*parts[0])
    return Logprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _logprobs(logits: Tensor, token_ids: Tensor, num: int, others: Tensor | None) -> tuple[Tensor, ...]:
    logprobs = logits.log_softmax(dim=1, dtype=torch.float32)
    own = token_ids[:, None]  # [S, 1]
    chosen = logprobs.gather(1, own).squeeze(1), (logits > logits.gather(1, own)).sum(dim=1) + 1
    if others is None:
        top = logprobs.topk(num if 0 <= num < logits.shape[1] else logits.shape[1], dim=1)
        return *chosen, top.indices, top.values
    ordered = logits.sort(dim=1).values
    larger = logits.shape[1] - torch.searchsorted(ordered, logits.gather(1, others), right=True)
    return *chosen, others, logprobs.gather(1, others), larger + 1


def _logprobs_of_rows(logits: Tensor, tokens: Tensor, wanted: LogprobRows) -> Logprobs:
    if wanted.rows is not None:
        logits, tokens = logits.index_select(0, wanted.rows), tokens.index_select(0, wanted.rows)
    return logprobs_of(logits, tokens, wanted.num, wanted.token_ids)


def _mask(scores: Tensor, masks: Masks) -> None:
    """Set tokens that grammars forbid to -inf, and raise allowed ones to at least BANNED. scores: [S, V]"""
    octets = masks.bits.view(torch.uint8)  # [R, 4 W], eight tokens each
    places = torch.arange(8, dtype=torch.uint8, device=scores.device)
    allowed = (octets[:, :, None] >> places & 1).view(len(octets), -1)[:, : scores.shape[1]]  # [R, V]
    held = scores.index_select(0, masks.rows).clamp_(min=BANNED).masked_fill_(allowed == 0, float("-inf"))
    scores.index_copy_(0, masks.rows, held)


def _edit(scores: Tensor, edits: _Edits, history: Tensor, lengths: Tensor, generated: Tensor) -> None:
    """Apply masks, bias and penalties to logits in fp32. [S, V]"""
    flat = scores.view(-1)
    if edits.disallowed is not None:  # clamped, so that allowed tokens stay above others even if their logits are -inf
        scores.clamp_(min=BANNED).masked_fill_(edits.disallowed, float("-inf"))
    if edits.words is not None:
        flat.index_add_(0, edits.words.places, _follows(edits.words, history, lengths, generated).float() * BANNED)
    if edits.bans is not None:
        active = generated[edits.bans.rows] < edits.bans.until
        flat.index_add_(0, edits.bans.places, active.float() * BANNED)
    if edits.biases is not None:
        flat.index_add_(0, *edits.biases)
    if edits.penalties is not None:
        _penalize(flat, edits.penalties, history, lengths)


def _follows(words: _Words, history: Tensor, lengths: Tensor, generated: Tensor) -> Tensor:
    """Whether each prefix is the end of its row's answer. [N] bool"""
    back = torch.arange(-words.prefixes.shape[1], 0, device=history.device)  # [P]
    places = (lengths[words.rows, None] + back).clamp_(min=0)  # [N, P]
    same = (history[words.rows[:, None], places] == words.prefixes) | (words.prefixes < 0)
    return same.all(dim=1) & (generated[words.rows] >= words.sizes)


def _penalize(flat: Tensor, penalties: _Penalties, history: Tensor, lengths: Tensor) -> None:
    """Apply penalties to the scores of all tokens that occur in their rows. flat: [S * V]"""
    tokens = history[penalties.rows]  # [R, L]
    position = torch.arange(history.shape[1], device=history.device)
    written = position < lengths[penalties.rows, None]
    answered = written & (position >= penalties.prompt_lengths)
    tokens = torch.where(written, tokens, tokens[:, :1]).long()  # padded with the first token
    counts = torch.zeros(len(tokens), penalties.vocab_size, dtype=torch.float32, device=flat.device)
    times = counts.scatter_add_(1, tokens, answered.float()).gather(1, tokens)
    places = tokens + penalties.starts
    x = flat[places]
    x = torch.where(x > 0, x / penalties.repetition, x * penalties.repetition)
    x.addcmul_(times, penalties.frequency, value=-1).addcmul_(times.clamp(max=1), penalties.presence, value=-1)
    flat.scatter_(0, places.view(-1), x.view(-1))  # all occurrences of a token have the same value


def _logprob_rows(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> tuple[LogprobRows, ...]:
    """Rows that want log-probabilities, in groups: up to FEW_LOGPROBS, each larger number, and requested token ids."""
    groups: dict[int | None, list[int]] = {}
    for row, each in enumerate(params):
        if each.logprob_token_ids is not None:
            groups.setdefault(None, []).append(row)
        elif each.logprobs is not None:
            num = vocab_size if each.logprobs < 0 else min(each.logprobs, vocab_size)
            groups.setdefault(max(num, FEW_LOGPROBS), []).append(row)
    found = []
    for most, places in groups.items():
        rows = None if len(places) == len(params) else _upload(places, torch.int64, device)
        if most is None:
            ids = [list(params[row].logprob_token_ids or ()) for row in places]
            longest = max(map(len, ids))
            padded = _upload([row + row[-1:] * (longest - len(row)) for row in ids], torch.int64, device)
            found.append(LogprobRows(tuple(places), rows, longest, padded))
        else:
            num = max(params[row].logprobs or 0 for row in places) if most == FEW_LOGPROBS else most
            found.append(LogprobRows(tuple(places), rows, min(num, vocab_size)))
    return tuple(found)


def _key(request: Request, salt: int) -> int:
    """64 bits from the seed, or from the request's name if it has none."""
    seed = request.params.seed
    text = f"seed {seed}" if seed is not None else f"request {salt} {request.request_id}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), signed=True)


def _upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on the device, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _upload_rows(
    rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Three rows in one copy; each starts at a multiple of 16 bytes, so that kernels are compiled once for all."""
    count = len(rows[0])
    padding = [0] * (-count % 4)
    first, second, third = _upload([[*row, *padding] for row in rows], dtype, device)
    return first[:count], second[:count], third[:count]


def _edits(
    requests: Sequence[Request],
    bad_words: Sequence[Sequence[Sequence[int]]] | None,
    vocab_size: int,
    device: torch.device,
) -> _Edits | None:
    params = [request.params for request in requests]
    found = _Edits(
        disallowed=_disallowed(params, vocab_size, device),
        biases=_biases(params, vocab_size, device),
        bans=_bans(requests, bad_words, vocab_size, device),
        words=_words(bad_words, vocab_size, device),
        penalties=_penalties(requests, vocab_size, device),
    )
    parts = (found.disallowed, found.biases, found.bans, found.words, found.penalties)
    return None if all(part is None for part in parts) else found


def _disallowed(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Tensor | None:
    rows = [row for row, each in enumerate(params) if each.allowed_token_ids is not None]
    if not rows:
        return None
    places = [row * vocab_size + token for row in rows for token in params[row].allowed_token_ids or ()]
    mask = torch.zeros(len(params), vocab_size, dtype=torch.bool, device=device)
    mask.index_fill_(0, _upload(rows, torch.int64, device), True)
    mask.view(-1).index_fill_(0, _upload(places, torch.int64, device), False)
    return mask


def _biases(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    given = [(row * vocab_size, dict(each.logit_bias or ())) for row, each in enumerate(params)]
    found = [(start + token, bias) for start, biases in given for token, bias in biases.items()]
    if not found:
        return None
    places, values = zip(*found, strict=True)
    return _upload(places, torch.int64, device), _upload(values, torch.float32, device)


def _bans(
    requests: Sequence[Request],
    bad_words: Sequence[Sequence[Sequence[int]]] | None,
    vocab_size: int,
    device: torch.device,
) -> _Bans | None:
    """Bans of end tokens until min_tokens, and of bad words with one token for ever. Unknown tokens need no ban."""
    found = []
    for row, request in enumerate(requests):
        params = request.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
        until = {token: params.min_tokens for token in ends if params.min_tokens > 0}
        until |= {word[0]: _FOREVER for word in (bad_words[row] if bad_words else ()) if len(word) == 1}
        found += [(row, row * vocab_size + token, limit) for token, limit in until.items() if token < vocab_size]
    if not found:
        return None
    rows, places, limits = _upload(list(zip(*found, strict=True)), torch.int64, device)
    return _Bans(rows, places, limits)


def _words(bad_words: Sequence[Sequence[Sequence[int]]] | None, vocab_size: int, device: torch.device) -> _Words | None:
    """Bad words of several tokens."""
    found = [
        (row, row * vocab_size + word[-1], len(word) - 1, word[:-1])
        for row, words in enumerate(bad_words or ())
        for word in words
        if len(word) > 1 and max(word) < vocab_size
    ]
    if not found:
        return None
    rows, places, sizes, prefixes = zip(*found, strict=True)
    longest = max(sizes)
    padded = [[-1] * (longest - len(prefix)) + list(prefix) for prefix in prefixes]
    row, place, size = _upload([rows, places, sizes], torch.int64, device)
    return _Words(row, place, size, _upload(padded, torch.int32, device))


def _penalties(requests: Sequence[Request], vocab_size: int, device: torch.device) -> _Penalties | None:
    rows = [
        row
        for row, params in enumerate(request.params for request in requests)
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
    ]
    if not rows:
        return None
    params = [requests[row].params for row in rows]
    factors = [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in params]
    repetition, presence, frequency = _upload(factors, torch.float32, device).split(1, dim=1)
    lengths = [len(requests[row].prompt_token_ids) for row in rows]
    places = [(row, row * vocab_size, length) for row, length in zip(rows, lengths, strict=True)]
    row_ids, starts, prompt_lengths = _upload(places, torch.int64, device).split(1, dim=1)
    return _Penalties(vocab_size, row_ids.squeeze(1), starts, prompt_lengths, repetition, presence, frequency)

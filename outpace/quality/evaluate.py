"""Perplexity of a model, and its agreement with a reference, window by window. Two models are never loaded at once."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from outpace.errors import InputError, as_field
from outpace.llm import LLM
from outpace.loading.dtypes import short
from outpace.loading.text import Text, read_text
from outpace.loading.windows import TextTokens, Window, check_window, make_windows, read_tokens
from outpace.quality.candidate import AnyModel, Candidate
from outpace.quality.report import Agreement, Evaluation, Perplexity, WindowLoss
from outpace.quality.score import HOST_BYTES, Distributions, Scores, score

WINDOW = 1024
"""Default of the most tokens of a window."""

Progress = Callable[[str, int, int], None]
"""Called with the current work, the number of tokens done, and the number of all tokens."""


def evaluate(
    model: AnyModel = None,
    *,
    against: AnyModel = None,
    text: Text = None,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    against_options: Mapping[str, Any] | None = None,
    host_bytes: int = HOST_BYTES,
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> Evaluation:
    """Perplexity of a model on a text, and how close it is to a reference, if there is one.

    `model` and `against` are what `outpace.LLM` takes, or LLMs; `options` and `against_options` are the options of each
    (including `tokenizer`). By default the reference runs on the same device; with `against_options` alone it is the
    same model with those options. `text` is text, token ids, the path of a text file, or None for the built-in text.
    Windows of `window` tokens (1,024, or the model's positions if those are fewer) begin every `stride` tokens (by
    default without overlap). `host_bytes` limits the memory for the reference's distributions: they are complete if
    they fit, else those of the likeliest tokens (`Agreement.exact`).
    """
    if window is not None:
        check_window(window, stride)
    if type(host_bytes) is not int or host_bytes < 0:
        raise InputError(f"host_bytes: expected an integer from 0, got {host_bytes!r}")
    name, text = read_text(text)
    candidates = [Candidate.of(model, options)]
    if against is not None or against_options is not None:
        same = {"device": options["device"]} if "device" in options and not isinstance(against, LLM) else {}
        candidates.append(_reference(model, against, {**same, **(against_options or {})}))
    tokens = _same_tokens(candidates, text, max_tokens)
    window = _window(candidates, window)
    windows = make_windows(tokens, window, stride)
    stride = check_window(window, stride, len(tokens.prefix))
    if len(candidates) == 1:
        found, _ = _run(candidates[0], tokens, windows, progress)
        return Evaluation(name, window, stride, found)
    kept = Distributions(sum(each.tokens for each in windows), host_bytes)
    reference, theirs = _run(candidates[1], tokens, windows, progress, keep=kept)
    found, own = _run(candidates[0], tokens, windows, progress, reference=kept)
    return Evaluation(name, window, stride, found, reference, _agreement(own, theirs, kept))


def perplexity(
    model: AnyModel, text: Text = None, window: int | None = None, stride: int | None = None,
    **options: Any,
) -> Perplexity:  # fmt: skip
    """How well a model predicts a text; see `evaluate`."""
    return evaluate(model, text=text, window=window, stride=stride, **options).model


def agreement(
    model: AnyModel, against: AnyModel, text: Text = None, window: int | None = None,
    stride: int | None = None, **options: Any,
) -> Agreement:  # fmt: skip
    """How close a model is to a reference; see `evaluate`."""
    if against is None:
        raise InputError("against: expected a model; give a name, a path, a module or an LLM")
    found = evaluate(model, against=against, text=text, window=window, stride=stride, **options).agreement
    assert found is not None
    return found


def _reference(model: AnyModel, against: AnyModel, options: Mapping[str, Any]) -> Candidate:
    """The reference: another model, or the same one with other options."""
    if against is None and isinstance(model, LLM | nn.Module):
        raise InputError("against: the same model with other options has to be loaded again; give its name or folder")
    if isinstance(against, nn.Module) and against is model:
        raise InputError("against: it is the same module as the model; pass an LLM of it, or load it twice")
    with as_field("against"):
        return Candidate.of(model if against is None else against, options)


def _same_tokens(candidates: Sequence[Candidate], text: str | Sequence[int], max_tokens: int | None) -> TextTokens:
    """The tokens of the text, if all models tokenize it in the same way."""
    first, *others = (read_tokens(candidate.tokenizer, text, max_tokens) for candidate in candidates)
    sizes = {candidate.vocab_size for candidate in candidates if candidate.vocab_size is not None}
    if any(other != first for other in others) or len(sizes) > 1:
        raise InputError(
            "against: the two models have different tokenizers or vocabularies, so their tokens cannot be compared "
            "one by one; evaluate each alone, and compare their bits per byte"
        )
    return first


def _window(candidates: Sequence[Candidate], asked: int | None) -> int:
    most = min(candidate.max_length for candidate in candidates)
    if asked is not None and asked > most:
        raise InputError(
            f"window: {asked} is more than the {most} tokens that the model takes; ask for {most} or fewer"
        )
    return min(WINDOW, most) if asked is None else asked


def _run(
    candidate: Candidate, tokens: TextTokens, windows: Sequence[Window], progress: Progress, **more: Distributions
) -> tuple[Perplexity, Scores]:
    progress("starting the model", 0, 0)
    with candidate.started() as llm:
        scores = score(llm, tokens, windows, **more, progress=lambda done, total: progress(llm.name, done, total))
        return _perplexity(candidate, llm, tokens, windows, scores), scores


def _perplexity(
    candidate: Candidate, llm: LLM, tokens: TextTokens, windows: Sequence[Window], scores: Scores
) -> Perplexity:
    parts = scores.nats.split([window.tokens for window in windows])
    return Perplexity(
        model=llm.name,
        dtype=short(llm.dtype),
        device=str(llm.device),
        options=candidate.options,
        tokens=len(scores.nats),
        nats=float(scores.nats.mean()),
        tokens_per_byte=len(tokens.ids) / tokens.num_bytes if tokens.num_bytes else None,
        windows=tuple(WindowLoss(len(part), float(part.mean())) for part in parts),
    )


def _agreement(own: Scores, theirs: Scores, kept: Distributions) -> Agreement:
    assert own.divergence is not None
    differences = own.nats - theirs.nats
    return Agreement(
        tokens=len(own.nats),
        top1=float((own.likeliest == theirs.likeliest).double().mean()),
        mean_kl=float(own.divergence.mean()),
        max_kl=float(own.divergence.max()),
        kept=kept.kept,
        exact=kept.exact,
        nats_error=float(differences.std(correction=0)) / math.sqrt(len(differences)),
    )

"""Whether a model with fused layers is still the model it was: plain Hugging Face and Outpace side by side."""

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outpace.config import InferenceConfig
from outpace.engine import InferenceEngine
from outpace.errors import InputError, ModelError, NotSupported
from outpace.inject.modules import FusedLayer
from outpace.inject.policies import by_class
from outpace.loading.build import Loaded, load
from outpace.loading.dtypes import short
from outpace.loading.inspect import ModelInfo, check_model, describe, generation_config
from outpace.loading.place import to_dtype
from outpace.log import chosen

TOLERANCE = 1e-4
"""Relative error that float32 may have against plain Hugging Face."""
HEADROOM = 1.5
"""A 16-bit run may be this many times as far from a float32 copy as plain Hugging Face is in the same dtype."""
WITHOUT_REFERENCE: Mapping[torch.dtype, float] = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative error against plain Hugging Face where there is no memory for a float32 copy."""
NEW_TOKENS = 32
LENGTHS: Mapping[str, tuple[int, ...]] = {"batch": (23, 7, 41, 2), "long": (300,), "short": (1,)}
"""The prompts' tokens; a model of few positions gets fewer."""
TEXT = (
    "The lighthouse keeper wrote down the weather every morning: wind from the west, 14 knots, and a grey sea. In 1911 "
    "he counted 37 ships, two of them under sail; by 1926 there were none. His daughter, who had learned to read from "
    "those pages, asked why anyone would want to know. \"Because,\" he said, \"somebody may ask later, and then it is too "
    "late to look.\" She kept the habit, first in a notebook, then in a table of numbers: date, pressure, temperature, "
    "rain. When the records were compared with the harbour's own, the two never differed by more than one degree."
)

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Compared:
    """One place in the model: how far it is off, and how far it may be."""

    name: str
    error: float
    """Worst relative error of a token's vector: |found - expected| / |expected|."""
    allowed: float

    @property
    def passed(self) -> bool:
        """A value that is not finite never passes."""
        return math.isfinite(self.error) and self.error <= self.allowed


@dataclass(frozen=True)
class PromptReport:
    """What was found with one set of prompts."""

    name: str
    lengths: tuple[int, ...]
    layers: tuple[Compared, ...]
    """The embedding, then each layer; what follows the last layer, such as a norm, is in its state."""
    logits: Compared | None
    new_tokens: int
    """Greedy tokens that were asked for; 0: the model does not generate."""
    first_difference: tuple[int, int] | None
    """Prompt and new token, both counted from 0, where the greedy tokens first differ."""

    @property
    def first_divergence(self) -> Compared | None:
        """The first layer that is further off than it may be; the logits where only they are."""
        return next((place for place in self.places if not place.passed), None)

    @property
    def places(self) -> tuple[Compared, ...]:
        """The layers, and the logits where there are any."""
        return self.layers if self.logits is None else (*self.layers, self.logits)


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    model: str
    dtype: str
    device: str
    rule: str
    """What the errors are taken against, and how large they may be."""
    tokens_count: bool
    """Whether greedy tokens must be equal: in 16 bits a tie may fall either way."""
    prompts: tuple[PromptReport, ...]

    @property
    def passed(self) -> bool:
        """Whether the injected model is the model it was."""
        same = all(report.first_difference is None for report in self.prompts)
        return (same or not self.tokens_count) and all(report.first_divergence is None for report in self.prompts)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON, which has no infinity: such an error is None."""
        finite = lambda pairs: {key: None if value == math.inf else value for key, value in pairs}  # noqa: E731
        return {"passed": self.passed, **asdict(self, dict_factory=finite)}


@dataclass(frozen=True)
class _Observed:
    """What a model made of one set of prompts: vectors of the real tokens [T, ...]."""

    states: list[Tensor]
    logits: Tensor | None
    tokens: Tensor | None = None


def verify(
    model: str | os.PathLike[str] | nn.Module | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
    **options: Any,
) -> Report:
    """Compare a model with its injected self: hidden states, logits, greedy tokens.

    `model` is what `outpace.LLM` takes; a live module is copied and left as it is. `options` are those of
    `init_inference` (dtype, device, injection_policy, ...).
    """
    asked = InferenceConfig.of(None, **options)
    loaded = _live(model, asked) if isinstance(model, nn.Module) else _load(model, asked)
    info = describe(loaded.model)
    prompts = _prompts(loaded.model, info, tokenizer or loaded.tokenizer, seed)
    config = _engine_config(asked, loaded, max(ids["input_ids"].shape[1] for ids in prompts.values()) + _new(info))
    _refuse_early(loaded.model, info, config)
    plain = [_observed(loaded.model, ids, _greedy(loaded.model, info)) for ids in prompts.values()]
    reference = _reference(loaded, prompts)
    engine = InferenceEngine(loaded.model, config)  # from here on it is no longer plain
    fused = [_observed(engine, ids, _greedy(engine, info)) for ids in prompts.values()]
    judge = _Judge(_layer_names(engine), loaded.dtype)
    sets = zip(prompts.items(), plain, reference or [None] * len(plain), fused, strict=True)
    reports = tuple(judge(name, ids, *observed) for (name, ids), *observed in sets)
    device, exact = str(engine.device), loaded.dtype not in WITHOUT_REFERENCE
    return Report(loaded.name, short(loaded.dtype), device, _rule(loaded.dtype, reference), exact, reports)


def _load(model: str | os.PathLike[str] | None, config: InferenceConfig) -> Loaded:
    if not isinstance(model, str | os.PathLike | None):
        raise ModelError(f"model: expected a name, a path or a Hugging Face model, got {type(model).__name__}")
    return load(None if model is None else os.fspath(model), dtype=config.dtype, device=config.torch_device)


def _live(model: nn.Module, config: InferenceConfig) -> Loaded:
    """A copy of somebody's module, to be injected in their stead."""
    if isinstance(model, InferenceEngine):
        raise InputError("model: expected the model itself and not an engine, which has changed it; load it again")
    if not isinstance(check_model(model), PreTrainedModel):
        raise ModelError(f"model: expected a Hugging Face model, got {type(model).__name__}; its outputs must be named")
    ours = copy.deepcopy(model).eval()
    dtype = config.dtype or next(tensor.dtype for tensor in ours.parameters() if tensor.is_floating_point())
    to_dtype(ours, dtype)
    return Loaded(ours.to(config.torch_device), None, type(model).__name__, None, dtype, "")


def _engine_config(asked: InferenceConfig, loaded: Loaded, longest: int) -> InferenceConfig:
    given = {**asked.given(), "dtype": loaded.dtype, "max_out_tokens": longest}
    if asked.injection_policy is None:
        given["replace_with_kernel_inject"] = True
    return InferenceConfig(**given)


def _refuse_early(model: nn.Module, info: ModelInfo, config: InferenceConfig) -> None:
    """What injection would refuse anyway, before the plain model has run for minutes."""
    if info.kind == "encoder-decoder":
        raise NotSupported(f"verify: {type(model).__name__} has an encoder and a decoder, which are not injected")
    kinds = {type(module) for module in model.modules()}
    names = {kind.__name__ for kind in kinds} | {f"{kind.__module__}.{kind.__name__}" for kind in kinds}
    if config.injection_policy is None and not names & by_class().keys():
        InferenceEngine(model, config)  # raises, with the families that it knows


def _new(info: ModelInfo) -> int:
    """New tokens of each prompt, with room for the prompt in the model's positions."""
    return min(NEW_TOKENS, max(1, (info.max_positions or 2 * NEW_TOKENS) // 2))


def _prompts(
    model: nn.Module, info: ModelInfo, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> dict[str, Inputs]:
    """Sets of prompts by name: text where there is a tokenizer for it, or else drawn tokens."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    vocab = embedding.weight.shape[0]
    text = [] if tokenizer is None else list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    if not text or max(text) >= vocab:
        text = torch.randint(3, vocab, (512,), generator=torch.Generator().manual_seed(seed)).tolist()
    limit = max(1, (info.max_positions or 2**31) - _new(info))
    device = embedding.weight.device
    return {
        name: _padded([_excerpt(text, 31 * row, min(length, limit)) for row, length in enumerate(lengths)], device)
        for name, lengths in LENGTHS.items()
    }


def _excerpt(tokens: list[int], start: int, length: int) -> list[int]:
    return [tokens[(start + place) % len(tokens)] for place in range(length)]


def _padded(rows: list[list[int]], device: torch.device) -> Inputs:
    """Padded on the left, as Hugging Face's generate wants it."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[row[0]] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def _observed(model: nn.Module, inputs: Inputs, greedy: Callable[[Inputs], Tensor] | None) -> _Observed:
    output = model(**inputs, output_hidden_states=True)
    if output.get("hidden_states") is None:
        raise ModelError("verify: the model gives no hidden states with output_hidden_states=True")
    real = inputs["attention_mask"].bool()

    def rows(values: Tensor) -> Tensor:
        return (values[real] if values.shape[:2] == real.shape else values).cpu()

    logits = output.get("logits")
    states = [rows(values) for values in output.hidden_states]
    tokens = None if greedy is None else greedy(inputs).cpu()
    return _Observed(states, None if logits is None else rows(logits), tokens)


def _greedy(model: Any, info: ModelInfo) -> Callable[[Inputs], Tensor] | None:
    """Generates the likeliest tokens; None: the model does not generate."""
    if not info.can_generate:
        return None
    own = generation_config(model)
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    pad = own.pad_token_id if own.pad_token_id is not None else ends[0]
    options = {"max_new_tokens": _new(info), "do_sample": False} | ({} if pad is None else {"pad_token_id": pad})
    return lambda inputs: model.generate(**inputs, **options)


def _reference(loaded: Loaded, prompts: Mapping[str, Inputs]) -> list[_Observed] | None:
    """What a float32 copy of a 16-bit model makes of the prompts; None: not needed, or no memory for it."""
    if loaded.dtype not in WITHOUT_REFERENCE:
        return None
    if not _has_room(loaded.model):
        chosen("reference", "none", "a float32 copy of the model does not fit in the free memory")
        return None
    exact = copy.deepcopy(loaded.model)
    to_dtype(exact, torch.float32)
    return [_observed(exact, inputs, None) for inputs in prompts.values()]


def _has_room(model: nn.Module) -> bool:
    """Whether a float32 copy fits beside the model, with a tenth to spare."""
    parameters = list(model.parameters())
    needed, device = 4.4 * sum(parameter.numel() for parameter in parameters), parameters[0].device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] > needed
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: the system will page
        return True
    free = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return free is None or 1024 * int(free) > needed


def _layer_names(engine: InferenceEngine) -> list[str]:
    return [path for path, module in engine.module.named_modules() if isinstance(module, FusedLayer)]


def _rule(dtype: torch.dtype, reference: Sequence[_Observed] | None) -> str:
    if dtype not in WITHOUT_REFERENCE:
        return f"relative error against plain Hugging Face up to {TOLERANCE:.0e}"
    if reference is None:
        return f"relative error against plain Hugging Face up to {WITHOUT_REFERENCE[dtype]:.0e}: no room for float32"
    return f"error against a float32 copy up to {HEADROOM} times that of plain Hugging Face in {short(dtype)}"


class _Judge:
    """Errors of what fused layers made, and what they may be, in one dtype."""

    def __init__(self, layers: list[str], dtype: torch.dtype) -> None:
        self._layers = layers
        self._tolerance = WITHOUT_REFERENCE.get(dtype, TOLERANCE)

    def __call__(
        self, name: str, inputs: Inputs, plain: _Observed, reference: _Observed | None, fused: _Observed
    ) -> PromptReport:
        places = tuple(self._compared(plain, reference, fused))
        count = len(plain.states)
        return PromptReport(
            name=name,
            lengths=tuple(inputs["attention_mask"].sum(1).tolist()),
            layers=places[:count],
            logits=None if plain.logits is None else places[count],
            new_tokens=0 if plain.tokens is None else plain.tokens.shape[1] - inputs["input_ids"].shape[1],
            first_difference=_first_difference(plain.tokens, fused.tokens, inputs["input_ids"].shape[1]),
        )

    def _compared(self, plain: _Observed, reference: _Observed | None, fused: _Observed) -> Iterator[Compared]:
        if len(plain.states) != len(fused.states):
            raise ModelError(f"verify: {len(plain.states)} hidden states plain, {len(fused.states)} injected")
        for place, (name, want, got) in enumerate(zip(self._names(plain), _all(plain), _all(fused), strict=True)):
            if reference is None:
                yield Compared(name, relative_error(want, got), self._tolerance)
            else:
                exact = _all(reference)[place]
                yield Compared(name, relative_error(exact, got), HEADROOM * relative_error(exact, want))

    def _names(self, plain: _Observed) -> list[str]:
        count = len(plain.states)
        states = ["embedding", *self._layers]
        names = states if len(states) == count else [f"hidden state {place}" for place in range(count)]
        return names if plain.logits is None else [*names, "logits"]


def _all(observed: _Observed) -> list[Tensor]:
    return observed.states if observed.logits is None else [*observed.states, observed.logits]


def relative_error(expected: Tensor, found: Tensor) -> float:
    """The worst |found - expected| / |expected| of a token's vector; infinite where something is not finite."""
    want, got = expected.float(), found.float()
    size = want.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    worst = ((got - want).norm(dim=-1) / size).max().item()
    return worst if math.isfinite(worst) else math.inf


def _first_difference(want: Tensor | None, got: Tensor | None, start: int) -> tuple[int, int] | None:
    """Prompt and new token where two outputs first differ, or where one of them ends."""
    if want is None or got is None:
        return None
    length = min(want.shape[1], got.shape[1])
    differ = (want[:, :length] != got[:, :length]).nonzero()
    if len(differ):
        row, column = min(differ.tolist(), key=lambda place: (place[1], place[0]))
        return row, column - start
    return None if want.shape == got.shape else (0, length - start)

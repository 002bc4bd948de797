"""Chooses a scheme for each weight (`quant.auto`): by estimates first, then by measuring the whole model on text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from outpace.config.quantization import AutoQuantConfig, QuantizationConfig
from outpace.errors import ConfigError
from outpace.loading.dtypes import short
from outpace.loading.sensitivity import Estimates, Schemes, Weight, estimates, loss
from outpace.loading.windows import TextTokens, Window, make_windows
from outpace.log import logger, size_text
from outpace.quant.asked import NAMED
from outpace.quant.auto import Choices, Option
from outpace.quant.plan import Measured, PlannedScheme, PlannedWeight, QuantPlan
from outpace.quant.rules import Rules
from outpace.quant.scheme import Scheme

WINDOW = 1024
"""Maximum tokens in one pass."""
ESTIMATE = (2, 512)
"""(number of windows, tokens of each) for estimates."""
ROUNDS = 8
"""Maximum number of plans that are measured."""
CLOSE = 0.02
"""Relative size difference that is not worth another measurement."""

Report = Callable[[str, int, int], None]
"""Called with the current task, the passes done, and all passes."""


@dataclass(frozen=True)
class Sample:
    """A text to measure the loss on."""

    name: str
    tokens: TextTokens
    windows: Sequence[Window]

    @classmethod
    def of(cls, name: str, tokens: TextTokens, window: int) -> "Sample":
        return cls(name, tokens, make_windows(tokens, window))

    @property
    def predicted(self) -> int:
        return sum(window.tokens for window in self.windows)


@dataclass
class Chooser:
    """Chooses a plan for one model, whose weights are loaded on its device."""

    model: nn.Module
    weights: Sequence[Weight]
    quant: QuantizationConfig
    itemsize: int
    """Bytes of one unquantized parameter."""
    calibration: Sample
    evaluation: Sample | None
    others: int
    """Bytes of all weights that are not linears."""
    report: Report = lambda what, done, total: None
    _measured: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def _auto(self) -> AutoQuantConfig:
        assert self.quant.auto is not None, "a plan is chosen only if quant.auto is set"
        return self.quant.auto

    def choose(self) -> QuantPlan:
        """Estimate, choose and measure; repeat until the bound holds."""
        asked = {weight: schemes for weight in self.weights if (schemes := self._schemes(weight))}
        if not asked:
            raise ConfigError(
                f"quant.auto: {type(self.model).__name__} has no linears that can be quantized; remove it"
            )
        if self._auto.max_perplexity_increase is None:  # fail before minutes of measuring
            self._within(self._choices({weight: dict.fromkeys(schemes, 0.0) for weight, schemes in asked.items()}))
        before = self._loss("the model as it is", self.calibration, {})
        found = self._estimates(asked)
        choices = self._choices(found)
        if self._auto.max_perplexity_increase is None:
            picks = self._within(choices)
        else:
            picks = self._below(choices, before, math.log1p(self._auto.max_perplexity_increase))
        return self._plan(choices, picks, found, before)

    def _schemes(self, weight: Weight) -> list[Scheme]:
        rules = (Rules(NAMED[name], qkv=self.quant.qkv.enabled, fit=True) for name in self._auto.schemes)
        found = [rule.of(weight.role, weight.names, weight.shape) for rule in rules]
        return list(dict.fromkeys(scheme for scheme in found if scheme is not None))

    def _estimates(self, asked: Mapping[Weight, Sequence[Scheme]]) -> Estimates:
        count, length = ESTIMATE
        tokens = self.calibration.tokens
        length = min(length, max(len(tokens.of(window)) for window in self.calibration.windows))
        windows = [tokens.of(each) for each in make_windows(tokens, length)[:count]]
        windows = [ids for ids in windows if len(ids) == len(windows[0])]
        return estimates(self.model, asked, windows, self._passes("estimates"))

    def _choices(self, found: Estimates) -> Choices:
        return Choices([self._options(weight, found.get(weight, {})) for weight in self.weights])

    def _options(self, weight: Weight, found: Mapping[Scheme, float]) -> list[Option]:
        """The options of a weight, smallest first. A weight without estimates is not quantized."""
        whole = math.prod(weight.shape) * self.itemsize
        stays = 0 if weight.tied and self._auto.max_bytes is not None else whole
        made = [Option(scheme, scheme.nbytes(weight.shape), nats) for scheme, nats in found.items()]
        return sorted([*made, Option(None, stays, 0.0)], key=lambda option: (option.nbytes, option.nats))

    def _within(self, choices: Choices) -> list[int]:
        """The choice with the least loss within a size."""
        auto = self._auto
        if auto.max_bytes is not None:
            name, room, shown = "max_bytes", auto.max_bytes - self.others, size_text
        else:
            assert auto.bits_per_weight is not None, "there is one bound"
            count = sum(math.prod(weight.shape) for weight in self.weights)
            name, room = "bits_per_weight", int(auto.bits_per_weight * count / 8)
            shown = partial(_bits, count=count)
        picks = choices.least_loss(room)
        if picks is None:
            least = choices.smallest + (self.others if auto.max_bytes is not None else 0)
            raise ConfigError(
                f"quant.auto.{name}: with quant.auto.schemes={list(auto.schemes)} the minimum is {shown(least)}; allow "
                "more, or give smaller schemes"
            )
        return picks

    def _below(self, choices: Choices, before: float, limit: float) -> list[int]:
        """The smallest choice whose measured loss grows by at most the limit.

        Estimates decide which weights get more bytes first; measurements decide when to stop: a bisection between a
        sum of estimates that stays below the limit and one that does not.
        """
        target, holds, fails, most = limit, 0.0, math.inf, 0
        best: list[int] | None = None
        for _ in range(4 * ROUNDS):  # most rounds find a plan that was measured before
            picks = choices.least_bytes(target)
            assert picks is not None, "unquantized weights add no loss"
            if tuple(picks) not in self._measured and len(self._measured) == ROUNDS:
                break
            added = self._measure(choices, picks, f"plan {len(self._measured) + 1}") - before
            if added <= limit:
                holds = target
                best = picks if best is None or choices.size(picks) < choices.size(best) else best
            else:
                fails = target
            if math.isinf(fails) and not any(picks):
                break  # this is the smallest choice
            if added > limit:
                most = max(most, choices.size(picks))
            if best is not None and choices.size(best) - most < CLOSE * choices.size(best):
                break
            target = _next(target, holds, fails, limit / max(added, limit / 8))
        stays = [next(n for n, option in enumerate(each) if option.scheme is None) for each in choices.options]
        return stays if best is None else best

    def _measure(self, choices: Choices, picks: Sequence[int], what: str) -> float:
        key = tuple(picks)
        if key not in self._measured:
            found = self._measured[key] = self._loss(what, self.calibration, self._chosen(choices, picks))
            logger.info("%s: %s, loss %.4f", what, size_text(choices.size(picks)), found)
        return self._measured[key]

    def _chosen(self, choices: Choices, picks: Sequence[int]) -> Schemes:
        found = zip(self.weights, choices.options, picks, strict=True)
        return {weight: scheme for weight, each, pick in found if (scheme := each[pick].scheme) is not None}

    def _loss(self, what: str, sample: Sample, schemes: Schemes) -> float:
        advance = self._passes(f"{what}, on {sample.name}", len(sample.windows))
        return loss(self.model, sample.tokens, sample.windows, schemes, advance)

    def _passes(self, what: str, total: int = 0) -> Callable[[], None]:
        done = 0
        self.report(what, 0, total)

        def advance() -> None:
            nonlocal done
            done += 1
            self.report(what, done, total)

        return advance

    def _plan(self, choices: Choices, picks: Sequence[int], found: Estimates, before: float) -> QuantPlan:
        schemes = self._chosen(choices, picks)
        after = self._measure(choices, picks, "the plan")
        auto = self._auto
        planned = []
        for weight, each, pick in zip(self.weights, choices.options, picks, strict=True):
            scheme = each[pick].scheme
            planned.append(
                PlannedWeight(
                    names=weight.names,
                    shape=weight.shape,
                    scheme=None if scheme is None else PlannedScheme.written(scheme),
                    nbytes=math.prod(weight.shape) * self.itemsize if scheme is None else scheme.nbytes(weight.shape),
                    why=_why(each, pick),
                    estimates={str(scheme): nats for scheme, nats in found.get(weight, {}).items()},
                )
            )
        other = self.evaluation
        pair = () if other is None else (self._loss("as it is", other, {}), self._loss("the plan", other, schemes))
        return QuantPlan(
            version=1,
            model=type(self.model).__name__,
            dtype=short(next(self.model.parameters()).dtype),
            asked={name: value for name, value in auto.model_dump(mode="json").items() if value and name != "out"},
            weights=tuple(planned),
            calibration=_as_measured(self.calibration, before, after),
            evaluation=None if other is None else _as_measured(other, *pair),
        )


def _next(target: float, holds: float, fails: float, ratio: float) -> float:
    """The next bound to try. ratio: the limit divided by the measured increase."""
    if math.isinf(fails):
        return target * min(4.0, max(1.25, ratio))
    if holds == 0.0:
        return target * min(0.8, max(1 / 16, 0.8 * ratio))
    return math.sqrt(holds * fails)


def _bits(size: float, count: int) -> str:
    return f"{8 * size / count:.2f} bits"


def _as_measured(sample: Sample, before: float, after: float) -> Measured:
    return Measured(
        text=sample.name,
        tokens=sample.predicted,
        before=math.exp(min(before, 700)),
        after=math.exp(min(after, 700)),
    )


def _why(options: Sequence[Option], pick: int) -> str:
    """Why a weight got its scheme, in words."""
    if len(options) == 1:
        return "no scheme applies, or the text did not run it"
    own = f"adds {_percent(options[pick].nats)}"
    if pick == 0:
        return (
            f"the fewest bytes, {own} by estimate" if options[0].scheme else "its tensor is needed unquantized anyway"
        )
    smaller = options[pick - 1]
    what = "as it is" if smaller.scheme is None else smaller.scheme.values
    return f"{what} would add {_percent(smaller.nats)} by estimate, this {own}"


def _percent(nats: float) -> str:
    return f"{100 * math.expm1(min(nats, 50)):.3g} % of perplexity"

"""What the planner reckons with: the numbers of a model, budgets, rates, and the work."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Experts:
    """The experts of one layer."""

    total: int
    per_token: int
    weights: Mapping[str, int]
    """Bytes of one expert, by precision."""

    def touched(self, tokens: float) -> float:
        """How many of them so many tokens go to, if each is as likely as any other."""
        return self.total * (1 - (1 - self.per_token / self.total) ** tokens)


@dataclass(frozen=True)
class Layer:
    """One layer of the model: what is streamed as a whole, or stays."""

    weights: Mapping[str, int]
    """Bytes by precision, experts among them."""
    flops: int
    """Of one token, with the experts that it goes to, attention left out."""
    kv_bytes: int = 0
    """Of one token."""
    attention_flops: int = 0
    """Of one token, for each token that it looks at."""
    window: int = 0
    """Tokens that a token looks at; 0: all."""
    experts: Experts | None = None

    def read_bytes(self, precision: str, tokens: float) -> float:
        """Weights that so many tokens together read."""
        if self.experts is None:
            return self.weights[precision]
        one = self.experts.weights[precision]
        return self.weights[precision] - one * (self.experts.total - self.experts.touched(tokens))

    def seen(self, context: float) -> float:
        """How many tokens of a context are looked at."""
        return min(context, self.window) if self.window else context


@dataclass(frozen=True)
class Numbers:
    """A model in numbers. All mappings are by precision: the model's dtype by its name, int8, int4, fp8."""

    layers: tuple[Layer, ...]
    rest: Mapping[str, int]
    """Bytes of what is never streamed: embedding, head, norms."""
    head: Mapping[str, int]
    """Bytes of them that are read when tokens are chosen."""
    head_flops: int = 0
    """Of one choice of a token."""
    workspace: int = 0
    """Bytes on the device beside weights and cache, whatever the step."""
    token_workspace: int = 0
    """And for each token of a micro-batch, inside of a layer."""
    hidden_bytes: int = 0
    """And for each token of the other micro-batches of a step, between layers."""
    choice_bytes: int = 0
    """And for each request of which a token is chosen."""
    page: int = 1
    """Tokens of a page of the cache."""

    def sizes(self, precision: str) -> tuple[int, ...]:
        """Bytes of each layer."""
        return tuple(layer.weights[precision] for layer in self.layers)

    def kv_bytes(self, tokens: int) -> int:
        """Of the pages for so many tokens of one request."""
        return -(-tokens // self.page) * self.page * sum(layer.kv_bytes for layer in self.layers)


@dataclass(frozen=True)
class Budgets:
    """Bytes that may be taken."""

    device: int
    host: int = 0
    disk: int | None = None
    """None: there is no disk."""


@dataclass(frozen=True)
class Rates:
    """Bytes and operations per second, as measured."""

    bandwidth: float
    """Of the device's memory."""
    flops: float
    """Of large products in the model's dtype."""
    link: float | None = None
    """From pinned host memory to the device; None: the device is the host."""
    disk: float | None = None
    """Read from disk; None: not known, and nothing is planned there."""

    @staticmethod
    def load_or_measure(device: "torch.device", folder: Path | None, cache: Path, *, again: bool = False) -> "Rates":
        """Of this machine; `folder`: for layers on disk; `cache`: the folder where they are kept."""
        from outpace.offload.probe import probe  # it needs torch, which planning does not

        return probe(device, folder, cache, again=again).rates


@dataclass(frozen=True)
class Work:
    """What is to be done."""

    prompt: int = 512
    """Tokens of a prompt."""
    new: int = 32
    """Tokens that follow it."""
    requests: int = 1

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt), ("gen", self.new), ("requests", self.requests)):
            if value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value}")


@dataclass(frozen=True)
class Efficiency:
    """Parts of the measured rates that steps reach, and what they take beside."""

    link: float = 0.995
    disk: float = 0.95
    bandwidth: float = 0.85
    """Where a step has few rows, and reading takes the time."""
    compute: float = 0.80
    """Where it has many, and products take it."""
    half_rows: float = 0.35
    """Rows with which products reach half of that, as a part of flops / bandwidth: 64 rows of an H200, 2 of a CPU."""
    by_precision: Mapping[str, float] = field(default_factory=lambda: {"int8": 0.8, "int4": 0.8, "fp8": 1.3})
    """Products with quantized weights beside those in the model's dtype; with fp8 activations are fp8 too."""
    step_seconds: float = 5e-4
    """Of the host between two steps."""
    layer_seconds: float = 2e-5
    """Launches in a layer, out of a captured graph."""
    eager_layer_seconds: float = 5e-4
    """The same where some layers come from disk, and nothing is captured."""


PERFECT = Efficiency(
    link=1.0,
    disk=1.0,
    bandwidth=1.0,
    compute=1.0,
    half_rows=0.0,
    by_precision={"fp8": 2.0},
    step_seconds=0.0,
    layer_seconds=0.0,
    eager_layer_seconds=0.0,
)
"""The limit: rates are reached, and nothing is waited for. Products of fp8 are twice as fast as those of bf16."""

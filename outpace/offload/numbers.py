"""The inputs of the planner: sizes of a model, memory budgets, measured rates, and the work."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from outpace.errors import ConfigError


@dataclass(frozen=True)
class Experts:
    """The experts of one layer."""

    total: int
    per_token: int
    weights: Mapping[str, int]
    """Bytes of one expert, by precision."""

    def touched(self, tokens: float) -> float:
        """Expected number of experts that this many tokens use, if all are equally likely."""
        return self.total * (1 - (1 - self.per_token / self.total) ** tokens)


@dataclass(frozen=True)
class Layer:
    """One layer of the model; it is streamed or stays as a whole."""

    weights: Mapping[str, int]
    """Bytes by precision, including experts."""
    flops: int
    """Operations for one token with its experts, without attention."""
    kv_bytes: int = 0
    """Bytes of keys and values of one token."""
    attention_flops: int = 0
    """Operations for one token and each token in its context."""
    window: int = 0
    """Sliding window in tokens; 0: none."""
    experts: Experts | None = None

    def read_bytes(self, precision: str, tokens: float) -> float:
        """Bytes of weights that a batch of this many tokens reads."""
        if self.experts is None:
            return self.weights[precision]
        one = self.experts.weights[precision]
        return self.weights[precision] - one * (self.experts.total - self.experts.touched(tokens))

    def seen(self, context: float) -> float:
        """Tokens of a context that attention reads."""
        return min(context, self.window) if self.window else context


@dataclass(frozen=True)
class Numbers:
    """Sizes and costs of a model. The keys of mappings are precisions: the name of the model's dtype, int8, int4,
    fp8."""

    layers: tuple[Layer, ...]
    rest: Mapping[str, int]
    """Bytes of weights that are never streamed: embedding, head, norms."""
    head: Mapping[str, int]
    """Bytes of the head, which are read to choose tokens."""
    head_flops: int = 0
    """Operations to choose one token."""
    workspace: int = 0
    """Device bytes besides weights and cache, independent of the step."""
    token_workspace: int = 0
    """More bytes for each token of the running micro-batch."""
    hidden_bytes: int = 0
    """More bytes for each token of the other micro-batches of a step."""
    choice_bytes: int = 0
    """More bytes for each request for which a token is chosen."""
    page: int = 1
    """Tokens in a page of the cache."""

    def sizes(self, precision: str) -> tuple[int, ...]:
        return tuple(layer.weights[precision] for layer in self.layers)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the pages for this many tokens of one request."""
        return -(-tokens // self.page) * self.page * sum(layer.kv_bytes for layer in self.layers)


@dataclass(frozen=True)
class Budgets:
    """Bytes that a plan may use."""

    device: int
    host: int = 0
    disk: int | None = None
    """None: there is no disk."""


@dataclass(frozen=True)
class Rates:
    """Measured rates of a machine."""

    bandwidth: float
    """Bytes per second of the device's memory."""
    flops: float
    """Operations per second of large products in the model's dtype."""
    link: float | None = None
    """Bytes per second from pinned host memory to the device; None: the device is the CPU."""
    disk: float | None = None
    """Bytes per second read from disk; None: unknown, so no plan uses it."""


@dataclass(frozen=True)
class Work:
    """The work to plan for."""

    prompt: int = 512
    """Tokens of a prompt."""
    new: int = 32
    """New tokens of each request."""
    requests: int = 1

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt), ("gen", self.new), ("requests", self.requests)):
            if value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value}")


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the measured rates that steps reach, and fixed costs."""

    link: float = 0.995
    disk: float = 0.95
    bandwidth: float = 0.85
    """For steps with few rows, which are bound by reads."""
    compute: float = 0.80
    """For steps with many rows, which are bound by products."""
    half_rows: float = 0.35
    """Rows at which products reach half of `compute`, as a fraction of flops / bandwidth: 64 rows on an H200, 2 on a
    CPU."""
    by_precision: Mapping[str, float] = field(default_factory=lambda: {"int8": 0.8, "int4": 0.8, "fp8": 1.3})
    """Speed of products with quantized weights relative to the model's dtype; for fp8, activations are fp8 too."""
    step_seconds: float = 5e-4
    """Seconds of host work between two steps."""
    layer_seconds: float = 2e-5
    """Seconds to launch a layer from a captured graph."""
    eager_layer_seconds: float = 5e-4
    """The same without a graph, because some layers are on disk."""


PERFECT = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, {"fp8": 2.0}, 0.0, 0.0, 0.0)
"""The limit: all rates are fully reached and nothing else costs time. fp8 products are twice as fast as bf16."""

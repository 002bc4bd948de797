"""Predicts the speed of a model with streamed layers from measured rates.

Copies overlap with computation, also across steps, because there is a slot for the next layer while one is computed. So
a step takes as long as the slowest of three: the link for all streamed bytes, the disk for bytes from disk, and the
device for all layers in turn, each bound by its reads or its products. If streamed layers are spread evenly, only the
first step waits for its first layer. Where link and device take about the same time, the prediction is too fast by up
to the computation of one layer for each copy.
"""

from dataclasses import dataclass
from typing import Literal

from outpace.offload.numbers import Efficiency, Numbers, Rates, Work
from outpace.offload.place import Placement

Resource = Literal["link", "disk", "device bandwidth", "compute", "device memory", "host memory"]


@dataclass(frozen=True)
class Schedule:
    """How requests are batched."""

    batch: int
    """Number of requests that run together."""
    micro_tokens: int
    """Maximum tokens of a micro-batch."""
    micro_batches: int
    """Number of micro-batches that use a layer while it is loaded."""

    @property
    def step_tokens(self) -> int:
        return self.micro_tokens * self.micro_batches


@dataclass(frozen=True)
class Seconds:
    """How long a step uses each resource. `reads` and `products`: device time of the layers that each of them binds."""

    link: float
    disk: float
    reads: float
    products: float
    host: float

    @property
    def total(self) -> float:
        """Seconds of the step: those of the slowest resource."""
        return max(self.link, self.disk, self.reads + self.products + self.host)

    @property
    def binds(self) -> Resource:
        """The slowest resource."""
        if self.total == self.disk and self.disk:
            return "disk"
        if self.total == self.link and self.link:
            return "link"
        return "device bandwidth" if self.reads >= self.products else "compute"


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a plan."""

    prompt: Seconds
    """One prefill step."""
    prompt_steps: int
    """Number of prefill steps for the prompts of a batch."""
    decode: Seconds
    """One decode step at the mean context length."""
    seconds: float
    """Seconds for the whole work."""
    tokens_per_second: float
    """Output tokens over the whole work."""
    binds: Resource
    """The resource that limits most of the time."""


def predict(
    numbers: Numbers,
    precision: str,
    placement: Placement,
    schedule: Schedule,
    rates: Rates,
    work: Work,
    efficiency: Efficiency | None = None,
) -> Prediction:
    sizes = numbers.sizes(precision)
    streamed = sum(sizes) - placement.tier_bytes(sizes, "device")
    first = sizes[0] if placement.tiers[0] != "device" else 0
    clock = Clock(numbers, rates, work, efficiency or Efficiency())
    return clock.predict(precision, streamed, placement.tier_bytes(sizes, "disk"), first, schedule)


class Clock:
    """Computes how long steps take. The device's part does not depend on the placement and is cached."""

    def __init__(self, numbers: Numbers, rates: Rates, work: Work, efficiency: Efficiency) -> None:
        self._numbers, self._rates, self._work, self._efficiency = numbers, rates, work, efficiency
        self._known: dict[tuple[str, Schedule, int, bool], tuple[tuple[float, float], tuple[float, float]]] = {}

    def predict(self, precision: str, streamed: int, on_disk: int, first: int, schedule: Schedule) -> Prediction:
        rounds, rest = divmod(self._work.requests, schedule.batch)
        seconds, spent = self._fill(first, on_disk), dict[Resource, float]()
        kinds = [(schedule.batch, rounds)] + ([(rest, 1)] if rest else [])
        for requests, times in kinds:
            steps = self._prompt_steps(requests, schedule)
            prompt, decode = self._steps(precision, streamed, on_disk, schedule, requests)
            for step, number in ((prompt, steps), (decode, self._work.new - 1)):
                seconds += times * number * step.total
                spent[step.binds] = spent.get(step.binds, 0.0) + times * number * step.total
        prompt, decode = self._steps(precision, streamed, on_disk, schedule, schedule.batch)
        return Prediction(
            prompt=prompt,
            prompt_steps=self._prompt_steps(schedule.batch, schedule),
            decode=decode,
            seconds=seconds,
            tokens_per_second=self._work.requests * self._work.new / seconds,
            binds=max(spent, key=lambda resource: spent[resource]),
        )

    def _fill(self, first: int, on_disk: int) -> float:
        """Seconds until the first layer is loaded, which may come from disk."""
        link, disk = self._rates.link, self._rates.disk
        own = first / (link * self._efficiency.link) if link is not None else 0.0
        return own + (first / (disk * self._efficiency.disk) if on_disk and disk is not None else 0.0)

    def _prompt_steps(self, requests: int, schedule: Schedule) -> int:
        return -(-requests * self._work.prompt // schedule.step_tokens)

    def _steps(
        self, precision: str, streamed: int, on_disk: int, schedule: Schedule, requests: int
    ) -> tuple[Seconds, Seconds]:
        key = (precision, schedule, requests, on_disk > 0)
        if key not in self._known:
            self._known[key] = self._device(*key)
        (prompt_reads, prompt_products), (reads, products) = self._known[key]
        link = streamed / (self._rates.link * self._efficiency.link) if self._rates.link is not None else 0.0
        disk = on_disk / (self._rates.disk * self._efficiency.disk) if on_disk and self._rates.disk is not None else 0.0
        host = self._efficiency.step_seconds
        return Seconds(link, disk, prompt_reads, prompt_products, host), Seconds(link, disk, reads, products, host)

    def _device(
        self, precision: str, schedule: Schedule, requests: int, eager: bool
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Seconds bound by reads and by products, for a prefill step and a decode step."""
        work, numbers = self._work, self._numbers
        steps = self._prompt_steps(requests, schedule)
        tokens = requests * work.prompt / steps
        parts = max(1, round(-(-tokens // schedule.micro_tokens)))
        launch = self._efficiency.eager_layer_seconds if eager else self._efficiency.layer_seconds
        prompt, decode, context = [0.0, 0.0], [0.0, 0.0], work.prompt + work.new / 2
        rows = tokens / parts
        for layer in numbers.layers:
            pairs = requests / steps * _pairs(work.prompt, layer.window)
            flops = tokens * layer.flops + pairs * layer.attention_flops
            reads = parts * layer.read_bytes(precision, rows) + tokens * layer.kv_bytes
            self._add(prompt, reads, flops / self._flops(precision, rows), parts * launch)
            flops = requests * (layer.flops + layer.seen(context) * layer.attention_flops)
            reads = layer.read_bytes(precision, requests) + requests * layer.seen(context) * layer.kv_bytes
            self._add(decode, reads, flops / self._flops(precision, requests), launch)
        for sums, choices in ((prompt, requests / steps), (decode, requests)):
            flops = choices * numbers.head_flops
            self._add(sums, numbers.head[precision], flops / self._flops(precision, choices), 0.0)
        return (prompt[0], prompt[1]), (decode[0], decode[1])

    def _flops(self, precision: str, rows: float) -> float:
        """Operations per second of products with this many rows."""
        efficiency = self._efficiency
        half = efficiency.half_rows * self._rates.flops / self._rates.bandwidth
        reached = efficiency.compute * rows / (rows + half)
        return self._rates.flops * reached * efficiency.by_precision.get(precision, 1.0)

    def _add(self, sums: list[float], reads: float, computing: float, launch: float) -> None:
        reading = reads / (self._rates.bandwidth * self._efficiency.bandwidth)
        if computing > max(reading, launch):
            sums[1] += computing
        else:
            sums[0] += max(reading, launch)


def _pairs(prompt: int, window: int) -> int:
    """Number of pairs (token, token that it attends to) in a prompt."""
    if not window or prompt <= window:
        return prompt * (prompt + 1) // 2
    return window * (window + 1) // 2 + (prompt - window) * window

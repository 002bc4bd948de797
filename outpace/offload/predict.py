"""How fast a model runs when layers are streamed, reckoned from rates.

Copies run beside computation, across the end of a step too, since the ring has room for the next layer while one is
computed. So a step takes as long as the slowest of three: the link for all that is streamed, the disk for what comes
from there, and the device for its layers one after the other, each as long as the larger of its reads and its products.
Nothing waits in between as long as streamed layers are spread evenly; only the very first step waits for its first
layer. Where link and device take about the same time, this is too good by up to a layer's computation for each copy.
"""

from dataclasses import dataclass
from typing import Literal

from outpace.offload.numbers import Efficiency, Numbers, Rates, Work
from outpace.offload.place import Placement

Resource = Literal["link", "disk", "device bandwidth", "compute", "device memory", "host memory"]


@dataclass(frozen=True)
class Schedule:
    """What happens at once."""

    batch: int
    """Requests."""
    micro_tokens: int
    """Tokens of a micro-batch, at most."""
    micro_batches: int
    """Micro-batches that use a layer while it is loaded."""

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, at most."""
        return self.micro_tokens * self.micro_batches


@dataclass(frozen=True)
class Seconds:
    """How long each resource is at work; of the device's time `reads` and `products` are the layers that they bind."""

    link: float
    disk: float
    reads: float
    products: float
    host: float

    @property
    def total(self) -> float:
        """The slowest one."""
        return max(self.link, self.disk, self.reads + self.products + self.host)

    @property
    def binds(self) -> Resource:
        """Which one is that."""
        if self.total == self.disk and self.disk:
            return "disk"
        if self.total == self.link and self.link:
            return "link"
        return "device bandwidth" if self.reads >= self.products else "compute"


@dataclass(frozen=True)
class Prediction:
    """How fast a plan does its work."""

    prompt: Seconds
    """Of one step of prompts, with all requests of a batch."""
    prompt_steps: int
    """How many such steps the prompts of a batch take."""
    decode: Seconds
    """Of one decode step at the mean context."""
    seconds: float
    """Of the whole work."""
    tokens_per_second: float
    """Output tokens over the whole work."""
    binds: Resource
    """What most of the time is spent waiting for."""


def predict(
    numbers: Numbers,
    precision: str,
    placement: Placement,
    schedule: Schedule,
    rates: Rates,
    work: Work,
    efficiency: Efficiency | None = None,
) -> Prediction:
    """How fast the model runs so."""
    sizes = numbers.sizes(precision)
    streamed = sum(sizes) - placement.tier_bytes(sizes, "device")
    first = sizes[0] if placement.tiers[0] != "device" else 0
    clock = Clock(numbers, rates, work, efficiency or Efficiency())
    return clock.predict(precision, streamed, placement.tier_bytes(sizes, "disk"), first, schedule)


class Clock:
    """How long steps take. What the device does is the same whatever is streamed, and computed once."""

    def __init__(self, numbers: Numbers, rates: Rates, work: Work, efficiency: Efficiency) -> None:
        self._numbers, self._rates, self._work, self._efficiency = numbers, rates, work, efficiency
        self._known: dict[tuple[str, Schedule, int, bool], tuple[tuple[float, float], tuple[float, float]]] = {}

    def predict(self, precision: str, streamed: int, on_disk: int, first: int, schedule: Schedule) -> Prediction:
        """A round of a batch after the other, each: its prompts, then a token of each request at a time."""
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
        """Until the first layer is there; where some come from disk it may be one of those."""
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
        """Seconds bound by reads and by products, of a step of prompts and of a decode step."""
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
        """Operations per second of products with so many rows."""
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
    """Pairs of tokens of a prompt of which one looks at the other."""
    if not window or prompt <= window:
        return prompt * (prompt + 1) // 2
    return window * (window + 1) // 2 + (prompt - window) * window

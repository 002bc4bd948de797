"""From the numbers of a model to a plan: what lives where, in which precision, how many requests at once, how fast."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from outpace.errors import ConfigError
from outpace.log import size_text
from outpace.offload.numbers import Budgets, Efficiency, Numbers, Rates, Work
from outpace.offload.place import Placement, everywhere, placements
from outpace.offload.predict import Clock, Prediction, Resource, Schedule

Kind = Literal["mixed", "host", "disk"]

SLOTS = 2  # as the runtime has them: a third one cannot make the link faster, and takes memory
STAGING = 3
"""Buffers in host memory that layers on disk pass through, each as large as the largest of them."""
MICRO_TOKENS = tuple(512 << power for power in range(8))
"""Tokens of a micro-batch that are tried, up to those of all prompts of a batch."""
ENOUGH = 1.01
"""A relief that is worth naming."""


@dataclass(frozen=True)
class Places:
    """Bytes by place."""

    rest: int
    """On the device: what is never streamed."""
    layers: int
    """On the device: layers that stay there."""
    ring: int
    """On the device: slots of the others."""
    kv: int
    """On the device: keys and values."""
    workspace: int
    """On the device: the rest of a step."""
    host: int
    """Layers in host memory."""
    staging: int
    """Buffers there that layers from disk pass through."""
    disk: int

    @property
    def device(self) -> int:
        """All on the device."""
        return self.rest + self.layers + self.ring + self.kv + self.workspace


@dataclass(frozen=True)
class Plan:
    """A way to run the model."""

    precision: str
    kind: Kind
    """mixed: as much as fits stays on the device; host, disk: every layer is streamed from there."""
    placement: Placement
    schedule: Schedule
    places: Places
    prediction: Prediction

    @property
    def tokens_per_second(self) -> float:
        """Predicted output tokens per second over the whole work."""
        return self.prediction.tokens_per_second


def best_plan(
    numbers: Numbers,
    budgets: Budgets,
    rates: Rates,
    work: Work,
    *,
    precisions: Sequence[str],
    micro_batches: int = 1,
    efficiency: Efficiency | None = None,
) -> Plan:
    """The plan with the most tokens per second by prediction; of equal ones the one that takes least of the device."""
    found = plans(
        numbers, budgets, rates, work, precisions=precisions, micro_batches=micro_batches, efficiency=efficiency
    )
    return max(found, key=lambda plan: (plan.tokens_per_second, -plan.places.device))


def plans(
    numbers: Numbers,
    budgets: Budgets,
    rates: Rates,
    work: Work,
    *,
    precisions: Sequence[str],
    micro_batches: int = 1,
    efficiency: Efficiency | None = None,
) -> list[Plan]:
    """The best of each precision, kind of placement and batch that fits; ConfigError: nothing does.

    micro_batches: most of them that use a layer while it is loaded; the runtime runs all tokens of a step at once.
    """
    if not precisions or not numbers.layers:
        raise ConfigError("plan: expected a model with layers, and at least one precision")
    planner = _Planner(numbers, budgets, rates, work, efficiency or Efficiency(), micro_batches)
    found = [
        plan for precision in precisions for batch in batches(work.requests) for plan in planner.of(precision, batch)
    ]
    if not found:
        raise planner.why_not(precisions)
    return found


def relief(
    numbers: Numbers,
    budgets: Budgets,
    rates: Rates,
    work: Work,
    *,
    precisions: Sequence[str],
    micro_batches: int = 1,
    efficiency: Efficiency | None = None,
) -> dict[Resource, float]:
    """How many times as fast the best plan would be with twice as much of a resource, where that helps; best first."""
    more: dict[Resource, tuple[Budgets, Rates]] = {
        "device memory": (Budgets(2 * budgets.device, budgets.host, budgets.disk), rates),
        "host memory": (Budgets(budgets.device, 2 * budgets.host, budgets.disk), rates),
        "device bandwidth": (budgets, Rates(2 * rates.bandwidth, rates.flops, rates.link, rates.disk)),
        "compute": (budgets, Rates(rates.bandwidth, 2 * rates.flops, rates.link, rates.disk)),
    }
    if rates.link is not None:
        more["link"] = (budgets, Rates(rates.bandwidth, rates.flops, 2 * rates.link, rates.disk))
    if rates.disk is not None:
        more["disk"] = (budgets, Rates(rates.bandwidth, rates.flops, rates.link, 2 * rates.disk))

    def speed(budgets: Budgets, rates: Rates) -> float:
        best = best_plan(
            numbers, budgets, rates, work, precisions=precisions, micro_batches=micro_batches, efficiency=efficiency
        )
        return best.tokens_per_second

    now = speed(budgets, rates)
    times = {resource: speed(*given) / now for resource, given in more.items()}
    return {name: times[name] for name in sorted(times, key=lambda name: -times[name]) if times[name] > ENOUGH}


def batches(requests: int) -> list[int]:
    """Numbers of requests at once that are tried: powers of two, and those that share the work out evenly."""
    powers = {1 << power for power in range(requests.bit_length()) if 1 << power <= requests}
    return sorted(powers | {-(-requests // rounds) for rounds in range(1, 9)})


class _Planner:
    """Tries out what fits."""

    def __init__(
        self,
        numbers: Numbers,
        budgets: Budgets,
        rates: Rates,
        work: Work,
        efficiency: Efficiency,
        micro_batches: int,
    ) -> None:
        self._numbers, self._rates, self._work, self._most = numbers, rates, work, micro_batches
        self._budgets = budgets if rates.disk is not None else Budgets(budgets.device, budgets.host)
        if rates.link is None:  # the device is the host: what would be in its memory is on the device
            self._budgets = Budgets(self._budgets.device, 0, self._budgets.disk)
        self._clock = Clock(numbers, rates, work, efficiency)

    @cached_property
    def _staging(self) -> int:
        """A CPU reads from disk into the slots themselves."""
        return 0 if self._rates.link is None else STAGING

    def of(self, precision: str, batch: int) -> Iterator[Plan]:
        """The fastest of each kind of placement; nothing where it does not fit."""
        best: dict[Kind, Plan] = {}
        for schedule in self._schedules(batch):
            for kind, placement in self._placements(precision, schedule):
                plan = self._plan(precision, kind, placement, schedule)
                if kind not in best or plan.tokens_per_second > best[kind].tokens_per_second:
                    best[kind] = plan
        yield from best.values()

    def _schedules(self, batch: int) -> Iterator[Schedule]:
        """Micro-batches of each size, and twice as many of them until one step has all prompts of a batch."""
        tokens = batch * self._work.prompt
        for micro in sorted({min(max(size, batch), tokens) for size in (*MICRO_TOKENS, tokens)}):
            number, enough = 1, min(self._most, -(-tokens // micro))
            while number < enough:
                yield Schedule(batch, micro, number)
                number *= 2
            yield Schedule(batch, micro, enough)

    def _left(self, precision: str, schedule: Schedule) -> int:
        """Bytes of the device for layers and slots."""
        return self._budgets.device - self._numbers.rest[precision] - self._kv(schedule) - self._workspace(schedule)

    def _kv(self, schedule: Schedule) -> int:
        return schedule.batch * self._numbers.kv_bytes(self._work.prompt + self._work.new)

    def _workspace(self, schedule: Schedule) -> int:
        numbers = self._numbers
        inside = schedule.micro_tokens * numbers.token_workspace + schedule.batch * numbers.choice_bytes
        between = (schedule.step_tokens - schedule.micro_tokens) * numbers.hidden_bytes
        return numbers.workspace + inside + between

    def _placements(self, precision: str, schedule: Schedule) -> Iterator[tuple[Kind, Placement]]:
        sizes, left, budgets = self._numbers.sizes(precision), self._left(precision, schedule), self._budgets
        with suppress(ConfigError):
            for placement in placements(sizes, left, budgets.host, budgets.disk, SLOTS, staging=self._staging):
                yield "mixed", placement
        if SLOTS * max(sizes) <= left and sum(sizes) <= budgets.host:
            yield "host", Placement(everywhere("host", len(sizes)), SLOTS)
        staging = self._staging * max(sizes)
        if SLOTS * max(sizes) <= left and sum(sizes) <= (budgets.disk or 0) and staging <= budgets.host:
            yield "disk", Placement(everywhere("disk", len(sizes)), SLOTS)

    def _plan(self, precision: str, kind: Kind, placement: Placement, schedule: Schedule) -> Plan:
        sizes = self._numbers.sizes(precision)
        resident, on_disk = (placement.tier_bytes(sizes, tier) for tier in ("device", "disk"))
        first = sizes[0] if placement.tiers[0] != "device" else 0
        largest = max((size for size, tier in zip(sizes, placement.tiers, strict=True) if tier == "disk"), default=0)
        places = Places(
            rest=self._numbers.rest[precision],
            layers=resident,
            ring=placement.device_bytes(sizes) - resident,
            kv=self._kv(schedule),
            workspace=self._workspace(schedule),
            host=sum(sizes) - resident - on_disk,
            staging=self._staging * largest,
            disk=on_disk,
        )
        prediction = self._clock.predict(precision, sum(sizes) - resident, on_disk, first, schedule)
        return Plan(precision, kind, placement, schedule, places, prediction)

    def why_not(self, precisions: Sequence[str]) -> ConfigError:
        """What is missing for the smallest way to run it."""
        precision = min(precisions, key=lambda name: sum(self._numbers.sizes(name)))
        schedule = min(self._schedules(1), key=self._workspace)
        left, sizes = self._left(precision, schedule), self._numbers.sizes(precision)
        try:
            list(placements(sizes, left, self._budgets.host, self._budgets.disk, SLOTS, staging=self._staging))
        except ConfigError as error:
            taken = size_text(self._budgets.device - left)
            return ConfigError(f"{error}. That is {precision} with one request; what is not layers takes {taken}")
        raise AssertionError("something fits")

"""Searches for the fastest plan to run a model: where layers live, the precision, the batch size."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Required, TypedDict, Unpack

from outpace.errors import ConfigError
from outpace.log import size_text
from outpace.offload.numbers import Budgets, Efficiency, Numbers, Rates, Work
from outpace.offload.place import Placement, everywhere, placements
from outpace.offload.predict import Clock, Prediction, Resource, Schedule

Kind = Literal["mixed", "host", "disk"]

SLOTS = 2  # as in the runtime: a third slot would not make the link faster, and takes memory
STAGING = 3
"""Number of host buffers for layers on disk, each as large as the largest of them."""
MICRO_TOKENS = tuple(512 << power for power in range(8))
"""Sizes of micro-batches to try, in tokens, up to all prompts of a batch."""
ENOUGH = 1.01
"""Smallest speedup that `relief` reports."""


@dataclass(frozen=True)
class Places:
    """Bytes by place."""

    rest: int
    """On the device: weights that are never streamed."""
    layers: int
    """On the device: layers that stay there."""
    ring: int
    """On the device: slots for streamed layers."""
    kv: int
    """On the device: keys and values."""
    workspace: int
    """On the device: workspace of a step."""
    host: int
    """Layers in host memory."""
    staging: int
    """Buffers in host memory for layers from disk."""
    disk: int

    @property
    def device(self) -> int:
        return self.rest + self.layers + self.ring + self.kv + self.workspace


@dataclass(frozen=True)
class Plan:
    """One way to run the model, with its predicted speed."""

    precision: str
    kind: Kind
    """mixed: as much as fits stays on the device; host, disk: every layer is streamed from there."""
    placement: Placement
    schedule: Schedule
    places: Places
    prediction: Prediction

    @property
    def tokens_per_second(self) -> float:
        return self.prediction.tokens_per_second


class Options(TypedDict, total=False):
    """Keywords of the functions that look for plans."""

    precisions: Required[Sequence[str]]
    micro_batches: int
    """Maximum number of micro-batches that use a layer while it is loaded. The runtime has 1."""
    efficiency: Efficiency


def best_plan(numbers: Numbers, budgets: Budgets, rates: Rates, work: Work, **options: Unpack[Options]) -> Plan:
    """The plan with the most predicted tokens per second; among equals, the one that uses the least device memory."""
    found = plans(numbers, budgets, rates, work, **options)
    return max(found, key=lambda plan: (plan.tokens_per_second, -plan.places.device))


def plans(numbers: Numbers, budgets: Budgets, rates: Rates, work: Work, **options: Unpack[Options]) -> list[Plan]:
    """The best plan for each precision, kind of placement and batch that fits; ConfigError if nothing fits."""
    precisions = options["precisions"]
    if not precisions or not numbers.layers:
        raise ConfigError("plan: expected a model with layers, and at least one precision")
    efficiency, micro_batches = options.get("efficiency", Efficiency()), options.get("micro_batches", 1)
    planner = _Planner(numbers, budgets, rates, work, efficiency, micro_batches)
    found = [
        plan for precision in precisions for batch in batches(work.requests) for plan in planner.of(precision, batch)
    ]
    if not found:
        raise planner.why_not(precisions)
    return found


def relief(
    numbers: Numbers, budgets: Budgets, rates: Rates, work: Work, **options: Unpack[Options]
) -> dict[Resource, float]:
    """The speedup of the best plan if a resource were doubled, largest first, where there is one."""
    more: dict[Resource, tuple[Budgets, Rates]] = {
        "device memory": (replace(budgets, device=2 * budgets.device), rates),
        "host memory": (replace(budgets, host=2 * budgets.host), rates),
        "device bandwidth": (budgets, replace(rates, bandwidth=2 * rates.bandwidth)),
        "compute": (budgets, replace(rates, flops=2 * rates.flops)),
    }
    if rates.link is not None:
        more["link"] = (budgets, replace(rates, link=2 * rates.link))
    if rates.disk is not None:
        more["disk"] = (budgets, replace(rates, disk=2 * rates.disk))
    now = best_plan(numbers, budgets, rates, work, **options).tokens_per_second
    times = {name: best_plan(numbers, *given, work, **options).tokens_per_second / now for name, given in more.items()}
    return {name: times[name] for name in sorted(times, key=lambda name: -times[name]) if times[name] > ENOUGH}


def batches(requests: int) -> list[int]:
    """Batch sizes to try: powers of two, and sizes that divide the requests into equal rounds."""
    powers = {1 << power for power in range(requests.bit_length()) if 1 << power <= requests}
    return sorted(powers | {-(-requests // rounds) for rounds in range(1, 9)})


class _Planner:
    """Enumerates the plans that fit."""

    def __init__(
        self, numbers: Numbers, budgets: Budgets, rates: Rates, work: Work, efficiency: Efficiency, micro_batches: int
    ) -> None:
        self._numbers, self._rates, self._work, self._most = numbers, rates, work, micro_batches
        self._budgets = budgets if rates.disk is not None else Budgets(budgets.device, budgets.host)
        if rates.link is None:  # on a CPU host memory is device memory
            self._budgets = Budgets(self._budgets.device, 0, self._budgets.disk)
        self._clock = Clock(numbers, rates, work, efficiency)

    @cached_property
    def _staging(self) -> int:
        """Number of staging buffers: a CPU needs none, it reads from disk directly into the slots."""
        return 0 if self._rates.link is None else STAGING

    def of(self, precision: str, batch: int) -> Iterator[Plan]:
        """The fastest plan of each kind of placement that fits."""
        best: dict[Kind, Plan] = {}
        for schedule in self._schedules(batch):
            for kind, placement in self._placements(precision, schedule):
                plan = self._plan(precision, kind, placement, schedule)
                if kind not in best or plan.tokens_per_second > best[kind].tokens_per_second:
                    best[kind] = plan
        yield from best.values()

    def _schedules(self, batch: int) -> Iterator[Schedule]:
        """Micro-batches of each size, doubling their number until one step has all prompts of a batch."""
        tokens = batch * self._work.prompt
        for micro in sorted({min(max(size, batch), tokens) for size in (*MICRO_TOKENS, tokens)}):
            number, enough = 1, min(self._most, -(-tokens // micro))
            while number < enough:
                yield Schedule(batch, micro, number)
                number *= 2
            yield Schedule(batch, micro, enough)

    def _left(self, precision: str, schedule: Schedule) -> int:
        """Device bytes for layers and slots."""
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
        """The error that says how much is missing even for the smallest plan."""
        precision = min(precisions, key=lambda name: sum(self._numbers.sizes(name)))
        schedule = min(self._schedules(1), key=self._workspace)
        left, sizes = self._left(precision, schedule), self._numbers.sizes(precision)
        try:
            list(placements(sizes, left, self._budgets.host, self._budgets.disk, SLOTS, staging=self._staging))
        except ConfigError as error:
            taken = size_text(self._budgets.device - left)
            return ConfigError(f"{error}. That is {precision} with one request; everything except layers takes {taken}")
        raise AssertionError("something fits")

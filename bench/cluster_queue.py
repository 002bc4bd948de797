"""Replicas behind a router, simulated request by request: how long a first token takes at which load.

Between two events of a replica its rates are constant: every running request gets a token with each step, and the
oldest prompt gets what is left of the step's token budget (Dynamic SplitFuse). So a replica needs an event only where a
request ends, a prompt is done or one arrives. Arrivals are Poisson, lengths uniform around their means; the same seed
gives the same figures.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from outpace.offload.numbers import Work

Policy = Literal["least loaded", "round robin"]
BUDGET = 2048  # tokens of a step
SPREAD = (0.1, 1.9)  # of the mean of a length
WARM_UP = 0.2  # of the requests, which are not counted


@dataclass(frozen=True)
class Speed:
    """How fast a replica is."""

    slots: int
    """Requests at once."""
    steps: Sequence[float]
    """Seconds of a step without prompts, of so many requests: at least `slots` + 1 of them."""
    prompt_token: float
    """Seconds that each prompt token adds to a step."""
    fill: float = 0.0
    """Seconds that a first token needs beside it: through the stages."""

    def capacity(self, work: Work) -> float:
        """Requests/s at most."""
        return 1 / (work.new * self.steps[self.slots] / self.slots + work.prompt * self.prompt_token)


class Arrival(NamedTuple):
    """A request."""

    at: float
    prompt: int
    new: int
    number: int


class Queue:
    """One replica: requests that wait, one whose prompt is computed, and those that decode."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._waiting: deque[Arrival] = deque()
        self._prompt: Arrival | None = None
        self._left = 0.0  # tokens of it
        self._running: list[tuple[float, int, Arrival]] = []  # a heap by the clock of tokens at which they end
        self._clock = 0.0  # tokens that a request has got that has run since the start
        self._now = 0.0
        self._count = 0

    def _rates(self) -> tuple[float, float]:
        """Tokens/s of each running request, and of the prompt."""
        running = len(self._running)
        step = self._speed.steps[running]
        if self._prompt is None:
            return 1 / step, 0.0
        chunk = max(1, BUDGET - running)
        step += chunk * self._speed.prompt_token
        return 1 / step, chunk / step

    def next_event(self) -> float:
        """When something ends here, if nothing arrives before; infinity: there is nothing to do."""
        token, prompt = self._rates()
        ends = (self._running[0][0] - self._clock) / token if self._running else math.inf
        return self._now + max(0.0, min(ends, self._left / prompt if self._prompt else math.inf))

    def arrive(self, request: Arrival) -> None:
        """One more."""
        self._advance(request.at)
        self._waiting.append(request)
        self._begin()

    def event(self) -> tuple[Arrival, bool]:
        """What happens next: a first token (False) or the end (True) of a request."""
        at = self.next_event()
        by_prompt = self._prompt is not None and self._now + self._left / self._rates()[1] <= at
        self._advance(at)
        if not by_prompt:
            self._clock, _, request = heapq.heappop(self._running)
            self._begin()
            return request, True
        assert self._prompt is not None
        request, self._prompt, self._left = self._prompt, None, 0.0
        self._count += 1
        heapq.heappush(self._running, (self._clock + request.new - 1, self._count, request))
        self._begin()
        return request, False

    def _advance(self, now: float) -> None:
        token, prompt = self._rates()
        self._clock += (now - self._now) * token
        self._left = max(0.0, self._left - (now - self._now) * prompt)
        self._now = now

    def _begin(self) -> None:
        """Compute the next prompt, if there is a slot for its request."""
        if self._prompt is None and self._waiting and len(self._running) < self._speed.slots:
            self._prompt = self._waiting.popleft()
            self._left = float(self._prompt.prompt)


@dataclass(frozen=True)
class Latencies:
    """What came out."""

    first: list[float]
    """Seconds to the first token, of the requests that count, in order of size."""
    latencies: list[float]
    """Seconds from arrival to the last token, of all requests."""
    requests_seconds: float
    """Requests in flight, summed up over the time."""

    def percentile(self, share: float) -> float:
        """The time that this share of first tokens did not take longer than."""
        return self.first[min(len(self.first) - 1, int(share * len(self.first)))]


def arrivals(rate: float, count: int, work: Work, seed: int) -> list[Arrival]:
    """So many requests, so many a second."""
    draw, now, found = random.Random(seed), 0.0, []
    for number in range(count):
        now += draw.expovariate(rate)
        prompt, new = (max(1, round(mean * draw.uniform(*SPREAD))) for mean in (work.prompt, work.new))
        found.append(Arrival(now, prompt, new, number))
    return found


def simulate(
    speed: Speed, replicas: int, requests: Sequence[Arrival], policy: Policy = "least loaded", routers: int = 1
) -> Latencies:
    """Send every request to a replica and wait for all of them. Each of several routers knows only its own requests."""
    queues, counts = [Queue(speed) for _ in range(replicas)], [[0] * replicas for _ in range(routers)]
    events: list[tuple[float, int, int]] = []  # time, replica, version of what was known of it
    versions, homes = [0] * replicas, dict[int, int]()
    first, latencies = dict[int, float](), list[float]()
    in_flight, summed, now = 0, 0.0, 0.0

    def plan(replica: int) -> None:
        versions[replica] += 1
        if (at := queues[replica].next_event()) < math.inf:
            heapq.heappush(events, (at, replica, versions[replica]))

    def until(limit: float) -> None:
        nonlocal in_flight, summed, now
        while events and events[0][0] <= limit:
            at, replica, version = heapq.heappop(events)
            if version != versions[replica]:
                continue
            request, ended = queues[replica].event()
            summed, now = summed + in_flight * (at - now), at
            if ended:
                in_flight -= 1
                latencies.append(at - request.at)
                counts[request.number % routers][homes.pop(request.number)] -= 1
            else:
                first[request.number] = at + speed.fill - request.at
            plan(replica)

    for request in requests:
        until(request.at)
        summed, now = summed + in_flight * (request.at - now), request.at
        known = counts[request.number % routers]
        turn = request.number % replicas
        if policy == "least loaded":  # among equals the one whose turn it is
            turn = min(range(turn, turn + replicas), key=lambda place: known[place % replicas]) % replicas
        known[turn] += 1
        homes[request.number] = turn
        in_flight += 1
        queues[turn].arrive(request)
        plan(turn)
    until(math.inf)
    counted = sorted(first[request.number] for request in requests[int(WARM_UP * len(requests)) :])
    return Latencies(counted, latencies, summed)

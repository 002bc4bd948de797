"""Answers of the router itself: health, and the numbers of all replicas together."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from starlette.datastructures import Headers
from starlette.responses import Response

from outpace.replicas.fleet import Fleet, Replica
from outpace.replicas.merge import Families, Family, Labels, Numbers, Shown, merged
from outpace.replicas.upstream import Broken, fetch
from outpace.server.metrics import CONTENT_TYPE, imbalance
from outpace.server.options import ServerConfig
from outpace.server.problems import ApiError
from outpace.server.responses import json_response
from outpace.server.supervisor import DRAINING

PATIENCE = 10.0  # seconds that a replica may take to send its numbers
_ADDED = frozenset(
    {
        *("in_flight", "running", "waiting", "free_blocks", "num_blocks", "steps", "restarts", "prompt_tokens"),
        *("generated_tokens", "preemptions", "prefix_hits", "prefix_queries", "step_tokens"),
    }
)
"""Numbers of /status that are added up; `added` adds up lists and tables too."""


class Pages:
    """Answers to a few GETs. `outcomes` and `rejected` count POST requests, for `Guard`."""

    def __init__(self, fleet: Fleet, options: ServerConfig, retried: Callable[[], int]) -> None:
        """retried: returns how often a request began again on another replica."""
        self._fleet, self._options, self._retried = fleet, options, retried
        self.numbers = Numbers()
        self.outcomes: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()

    def own(self) -> Mapping[str, Callable[[Headers], Awaitable[Response]]]:
        """The paths, and their handlers."""
        pages = {"/health/live": self.live, "/status": self.status, "/status/experts": self.experts}
        if self._options.metrics:
            pages["/metrics"] = self.metrics
        return pages | dict.fromkeys(("/health", "/healthz", "/health/ready"), self.ready)

    async def live(self, headers: Headers) -> Response:
        """The router answers."""
        return json_response({"status": "ok"})

    async def ready(self, headers: Headers) -> Response:
        """A replica takes requests."""
        why = DRAINING if self._fleet.draining else "" if self._fleet.num_ready else "no replica is"
        if why:
            raise ApiError(503, f"The server is not ready: {why}.", code="not_ready", retry=True)
        return await self.live(headers)

    async def metrics(self, headers: Headers) -> Response:
        """The numbers of all replicas for Prometheus, as those of one, and the router's own."""
        texts = await self._ask_all(b"/metrics", headers)
        for replica in self._fleet.replicas:
            self.numbers.take(replica.index, texts.get(replica.index, b"").decode() or None)
        body = await asyncio.to_thread(self._written, self.numbers.whole())
        return Response(body, headers={"content-type": CONTENT_TYPE})

    async def status(self, headers: Headers) -> Response:
        """/status of the first replica, with the numbers of all added up; and each replica's own."""
        found = [msgspec.json.decode(each) for each in (await self._ask_all(b"/status", headers)).values()]
        chooser = self._fleet.chooser
        replicas = [
            {"ready": each.ready, "in_flight": chooser.running[each.index], "restarts": each.restarts}
            for each in self._fleet.replicas
        ]
        return json_response({**added(found), "replicas": replicas})

    async def experts(self, headers: Headers) -> Response:
        """/status/experts with the tokens of all replicas."""
        found = [msgspec.json.decode(each) for each in (await self._ask_all(b"/status/experts", headers)).values()]
        load = _summed([each["tokens"] for each in found])
        return json_response(
            {"layers": found[0]["layers"], "tokens": load, "imbalance": [imbalance(each) for each in load]}
        )

    async def _ask_all(self, path: bytes, headers: Headers) -> dict[int, bytes]:
        """The answers of all ready replicas at a path, asked with the caller's key; an error if none answers."""
        key = [(b"authorization", headers["authorization"].encode("latin-1"))] if "authorization" in headers else []

        async def ask(replica: Replica) -> tuple[int, bytes]:
            async with asyncio.timeout(PATIENCE):
                status, body = await fetch(replica.path, b"GET", self._options.root_path.encode() + path, key)
            if status != 200:
                raise Broken(f"it answered {status}")
            return replica.index, body

        asked = [ask(each) for each in self._fleet.replicas if each.ready]
        results = await asyncio.gather(*asked, return_exceptions=True)
        found = dict(each for each in results if not isinstance(each, BaseException))
        if not found and path != b"/metrics":
            raise ApiError(503, "No replica is ready; try again later.", code="not_ready", retry=True)
        return found

    def _written(self, families: Families) -> bytes:
        """The families with the router's own, which replace the replicas' counts of requests."""
        labels = (dict(labels) for each in families.values() for _, labels in each.samples)
        model = next((each["model_name"] for each in labels if "model_name" in each), "")
        for name in ("outpace:http_requests", "outpace:http_requests_created"):
            families.pop(name, None)
        registry = CollectorRegistry()
        registry.register(Shown(merged([families, self._of_requests(model), self._of_replicas()])))
        return generate_latest(registry)

    def _of_requests(self, model: str) -> Families:
        return {
            **_counts("http_requests", "POST requests by outcome; each is in one.", "outcome", model, self.outcomes),
            **_counts("admission_rejections", "Requests that were refused.", "reason", model, self.rejected),
        }

    def _of_replicas(self) -> Families:
        fleet, chooser = self._fleet, self._fleet.chooser
        restarts = [each.restarts for each in fleet.replicas]
        ready = [int(each.ready) for each in fleet.replicas]
        return {
            **_numbers("replicas", "gauge", "Replicas there should be.", len(fleet.replicas)),
            **_numbers("replicas_ready", "gauge", "Replicas that take requests.", fleet.num_ready),
            **_numbers("replica_ready", "gauge", "1 while a replica takes requests.", ready),
            **_numbers("replica_requests_running", "gauge", "Requests that a replica has.", chooser.running),
            **_numbers("replica_load", "gauge", "Estimated cost of the requests that a replica has.", chooser.loads),
            **_numbers("replica_requests", "counter", "Requests that a replica was given.", chooser.totals),
            **_numbers("replica_restarts", "counter", "Processes of a replica that ended.", restarts),
            **_numbers("retried_requests", "counter", "Requests that began again on another replica.", self._retried()),
        }


def _numbers(name: str, kind: str, text: str, values: float | Sequence[float]) -> Families:
    """A family of one number, or of one for each replica."""
    sample = f"outpace:{name}{'_total' if kind == 'counter' else ''}"
    if isinstance(values, int | float):
        return {f"outpace:{name}": Family(text, kind, {(sample, ()): float(values)})}
    samples: dict[tuple[str, Labels], float] = {
        (sample, (("replica", str(index)),)): float(value) for index, value in enumerate(values)
    }
    return {f"outpace:{name}": Family(text, kind, samples)}


def _counts(name: str, text: str, label: str, model: str, counts: Mapping[str, int]) -> Families:
    samples: dict[tuple[str, Labels], float] = {}
    for value, count in counts.items():
        samples[f"outpace:{name}_total", tuple(sorted([(label, value), ("model_name", model)]))] = float(count)
    return {f"outpace:{name}": Family(text, "counter", samples)}


def added(replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """/status of several replicas as that of one server: numbers are added up, the rest is that of the first."""
    whole = dict(replies[0])
    for name in _ADDED & whole.keys():
        whole[name] = sum(each[name] for each in replies)
    whole["step_sizes"] = _summed([each["step_sizes"] for each in replies])
    whole["levels"] = {name: sum(each["levels"].get(name, 0) for each in replies) for name in whole["levels"]}
    whole["ready"] = any(each["ready"] for each in replies)
    return whole


def _summed(values: Sequence[Any]) -> Any:
    """Numbers, or lists of them of any depth, added up place by place."""
    if any(isinstance(each, list) for each in values):
        lists = [each if isinstance(each, list) else [] for each in values]
        return [_summed([each for each in place if each is not None]) for place in zip_longest(*lists)]
    return sum(values)

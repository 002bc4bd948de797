"""Which replica gets a request. Ray calls these inside the ingress; `plan.ROUTERS` names them."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

AVOID = "avoid"
"""Argument of a request: the replicas that could not answer it."""
PREFIX = "prefix"
"""Argument of a request: the beginning of its body, empty if there is none."""
COST = "cost"
"""Argument of a request: its cost, in generated tokens."""
SLACK = 0.5  # of a request's cost: a replica that has had its beginning may have this much more load
USUAL = 128.0  # cost of a request of which nothing is known
MOST_PREFIXES = 4096


class LeastLoaded(RequestRouter):
    """The replica with the fewest tokens to compute, or one that has had the same beginning and few more to compute.

    Ray's own router draws two replicas and takes the one with fewer requests. This one adds up the costs of the
    requests that it has sent (`replicas.asked`). Requests that it does not know (from other ingress processes, or on
    their way) count as the mean.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Nothing has been sent, no prompt has been seen."""
        self._costs: dict[str, dict[str, float]] = {}  # replica -> request -> what it costs
        self._seen: OrderedDict[bytes, str] = OrderedDict()  # beginning -> replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which they are tried."""
        left = _without_avoided(candidate_replicas, pending_request)
        loads = {each.replica_id.unique_id: self._load(each) for each in left}
        given = {} if pending_request is None else pending_request.kwargs
        warm = self._seen.get(given.get(PREFIX, b""))
        if warm in loads and loads[warm] <= min(loads.values()) + SLACK * given.get(COST, USUAL):
            loads[warm] = -1.0
        random.shuffle(left)  # random order among equal ones
        return [[each] for each in sorted(left, key=lambda each: loads[each.replica_id.unique_id])]

    def _load(self, replica: RunningReplica) -> float:
        known = list(self._costs.get(replica.replica_id.unique_id, {}).values())
        requests = self.replica_queue_len_cache.get(replica.replica_id) or 0
        mean = sum(known) / len(known) if known else USUAL
        return sum(known) + mean * max(0, requests - len(known))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Note the cost of a request that a replica has taken, and that this replica has its prompt in the cache."""
        given, name = pending_request.kwargs, replica_id.unique_id
        self._costs.setdefault(name, {})[pending_request.metadata.internal_request_id] = given.get(COST, USUAL)
        if prefix := given.get(PREFIX):
            self._seen[prefix] = name
            self._seen.move_to_end(prefix)
            if len(self._seen) > MOST_PREFIXES:
                self._seen.popitem(last=False)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Forget the cost of a request that has ended, in whatever way."""
        self._costs.get(replica_id.unique_id, {}).pop(internal_request_id, None)


class RoundRobin(RequestRouter):
    """Each replica in turn, whatever it has to do."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Begin with the first."""
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The next one."""
        left = sorted(
            _without_avoided(candidate_replicas, pending_request), key=lambda each: str(each.replica_id.unique_id)
        )
        self._turn += 1
        return [[left[self._turn % len(left)]]] if left else []


def _without_avoided(replicas: Sequence[RunningReplica], request: PendingRequest | None) -> list[RunningReplica]:
    """Replicas that have not failed this request, or all if every one has."""
    avoided = set() if request is None else set(request.kwargs.get(AVOID, ()))
    return [each for each in replicas if each.replica_id.unique_id not in avoided] or list(replicas)

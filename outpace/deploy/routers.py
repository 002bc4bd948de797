"""Which replica gets a request. Ray calls these inside the ingress; `plan.ROUTERS` names them."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

AVOID = "avoid"
"""Argument of a request: the replicas that could not answer it."""
PREFIX = "prefix"
"""Argument of a request: its beginning, empty if it says nothing."""
SLACK = 4  # requests that a replica may have more than another, if it has had the beginning of the prompt
MOST_PREFIXES = 4096


class LeastLoaded(RequestRouter):
    """The replica with the fewest requests, or one that has had the same beginning of a prompt and few more requests.

    Ray's own router draws two replicas and takes the better one. It counts what it has sent, so that looking at all of
    them costs no messages.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """No prompt has been seen."""
        self._seen: OrderedDict[bytes, str] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas: within a rank the caller takes the one with the shortest queue, and the first of equal
        ones."""
        left = _without_avoided(candidate_replicas, pending_request)
        return [*self._warm(left, pending_request), random.sample(left, len(left))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Remember who has the keys and values of this prompt."""
        if prefix := pending_request.kwargs.get(PREFIX):
            self._seen[prefix] = replica_id.unique_id
            self._seen.move_to_end(prefix)
            if len(self._seen) > MOST_PREFIXES:
                self._seen.popitem(last=False)

    def _warm(self, left: Sequence[RunningReplica], request: PendingRequest | None) -> list[list[RunningReplica]]:
        """The replica that has had the prompt's beginning, unless others have much less to do."""
        name = None if request is None else self._seen.get(request.kwargs.get(PREFIX, b""))
        loads = {each.replica_id.unique_id: self.replica_queue_len_cache.get(each.replica_id) or 0 for each in left}
        if name not in loads or loads[name] > min(loads.values()) + SLACK:
            return []
        return [[each for each in left if each.replica_id.unique_id == name]]


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

"""Which replica a request goes to. Ray's base class is replaced by the few names that the routers use of it."""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.anyio


class Router:
    """Ray's base class: it knows the queue of each replica, and calls the hooks."""

    def __init__(self) -> None:
        self.replica_queue_len_cache: Counter[Any] = Counter()
        self.initialize_state()

    def initialize_state(self) -> None:
        """Overridden."""


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake = ModuleType("ray.serve.request_router")
    names = {"RequestRouter": Router, "PendingRequest": object, "RunningReplica": object}
    for name, value in names.items():
        setattr(fake, name, value)
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.delitem(sys.modules, "outpace.deploy.routers", raising=False)
    yield importlib.import_module("outpace.deploy.routers")
    sys.modules.pop("outpace.deploy.routers", None)


class ReplicaID(str):
    """A name that says so, as Ray's does."""

    @property
    def unique_id(self) -> str:
        """The name."""
        return str(self)


REPLICAS = [SimpleNamespace(replica_id=ReplicaID(name)) for name in ("a", "b", "c")]


def request(number: int = 0, **given: Any) -> Any:
    return SimpleNamespace(kwargs=given, metadata=SimpleNamespace(internal_request_id=f"r{number}"))


async def order(router: Any, asked: Any = None) -> list[str]:
    """The replicas in the order in which they are tried."""
    return [each.replica_id for rank in await router.choose_replicas(list(REPLICAS), asked) for each in rank]


def send(router: Any, name: str, asked: Any) -> None:
    router.replica_queue_len_cache[ReplicaID(name)] += 1
    router.on_request_routed(asked, ReplicaID(name), None)


async def test_the_least_loaded_is_the_one_with_the_fewest_tokens_not_requests(routers: Any) -> None:
    router = routers.LeastLoaded()
    send(router, "a", request(1, cost=1000.0))
    for number in range(2, 5):
        send(router, "b", request(number, cost=20.0))
    send(router, "c", request(9, cost=100.0))
    assert await order(router, request()) == ["b", "c", "a"]
    router.on_request_completed(ReplicaID("a"), "r1")
    router.replica_queue_len_cache[ReplicaID("a")] -= 1
    assert (await order(router, request()))[0] == "a"


async def test_requests_of_others_count_as_the_mean(routers: Any) -> None:
    router = routers.LeastLoaded()
    router.replica_queue_len_cache.update({ReplicaID("a"): 3, ReplicaID("b"): 1, ReplicaID("c"): 2})
    assert await order(router) == ["b", "c", "a"]


async def test_of_equal_ones_any_may_be_first(routers: Any) -> None:
    router = routers.LeastLoaded()
    assert {(await order(router))[0] for _ in range(200)} == {"a", "b", "c"}


async def test_a_prompt_goes_where_its_beginning_is_unless_there_is_too_much_to_do(routers: Any) -> None:
    router, same = routers.LeastLoaded(), request(1, cost=100.0, prefix=b"once upon")
    send(router, "b", same)
    router.on_request_completed(ReplicaID("b"), "r1")
    router.replica_queue_len_cache.clear()
    assert (await order(router, same))[0] == "b"
    send(router, "b", request(3, cost=routers.SLACK * 100.0))
    assert (await order(router, same))[0] == "b"
    assert (await order(router, request(2, prefix=b"other")))[0] != "b"
    send(router, "b", request(4, cost=1.0))
    assert (await order(router, same))[0] != "b"


async def test_beginnings_are_forgotten_in_the_end(routers: Any) -> None:
    router = routers.LeastLoaded()
    for number in range(routers.MOST_PREFIXES + 5):
        asked = request(number, prefix=b"%d" % number)
        send(router, "a", asked)
        router.on_request_completed(ReplicaID("a"), f"r{number}")
    assert len(router._seen) == routers.MOST_PREFIXES
    assert not any(router._costs.values())


@pytest.mark.parametrize("name", ["LeastLoaded", "RoundRobin"])
async def test_replicas_that_failed_a_request_are_avoided_unless_all_did(routers: Any, name: str) -> None:
    router = getattr(routers, name)()
    for _ in range(6):
        assert "a" not in await order(router, request(avoid=["a"]))
        assert (await order(router, request(avoid=["a", "c"]))) == ["b"]
        assert await order(router, request(avoid=["a", "b", "c"])) != []


async def test_round_robin_takes_each_in_turn(routers: Any) -> None:
    router = routers.RoundRobin()
    first = [(await order(router))[0] for _ in range(6)]
    assert Counter(first) == {"a": 2, "b": 2, "c": 2}
    assert await router.choose_replicas([], None) == []

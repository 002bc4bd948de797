"""Which replica a request goes to: properties of every sequence of requests, and a race against taking turns."""

import heapq
import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from outpace.replicas.choose import LEVELS, ROOM, SAVED, Chooser, Wanted, cost_of

COUNT = 4
PREFIXES = st.integers(0, 5).flatmap(
    lambda which: st.integers(0, len(LEVELS)).map(lambda n: tuple(b"%d-%d" % (which, level) for level in range(n)))
)
WANTED = st.builds(Wanted, st.floats(1, 2000), PREFIXES)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), WANTED, st.sets(st.integers(0, COUNT - 1))),
        st.tuples(st.just("end"), st.integers(0, 1000), st.none()),
        st.tuples(st.just("forget"), st.integers(0, COUNT - 1), st.none()),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_happens_the_choice_is_ready_within_the_bound_and_known(
    steps: list[tuple[str, object, object]],
) -> None:
    chooser = Chooser(COUNT, most_prefixes=7)
    running: list[tuple[int, Wanted]] = []
    for what, value, ready in steps:
        if what == "begin":
            assert isinstance(value, Wanted)
            assert isinstance(ready, set)
            found = chooser.choose(ready, value.prefixes)
            if not ready:
                assert found is None
                continue
            assert found is not None
            assert found in ready
            least = min(chooser.loads[each] for each in ready)
            assert chooser.loads[found] <= least + ROOM + SAVED * max(LEVELS[: len(value.prefixes)], default=0)
            if not value.prefixes:
                assert chooser.loads[found] == least
            chooser.begin(found, value)
            running.append((found, value))
            assert chooser.choose(ready, value.prefixes) in ready
        elif what == "end" and running:
            assert isinstance(value, int)
            chooser.end(*running.pop(value % len(running)))
        elif what == "forget":
            assert isinstance(value, int)
            chooser.forget(value)
        assert chooser.remembered <= 7
        assert sum(chooser.running) == len(running)
        for replica in range(COUNT):
            own = [wanted.cost for where, wanted in running if where == replica]
            assert abs(chooser.loads[replica] - sum(own)) < 1e-6
            assert chooser.running[replica] == len(own)
    for each in running:
        chooser.end(*each)
    assert chooser.loads == [0.0] * COUNT


def test_the_longest_known_beginning_decides() -> None:
    chooser = Chooser(3)
    chooser.begin(1, Wanted(10.0, (b"a",)))
    chooser.begin(2, Wanted(10.0, (b"a", b"ab")))
    assert chooser.choose([0, 1, 2]) == 0
    assert chooser.choose([0, 1, 2], (b"a",)) == 1
    assert chooser.choose([0, 1, 2], (b"a", b"ab", b"abc")) == 2
    assert chooser.choose([0, 1], (b"a", b"ab")) == 1, "the one that has all of it is not ready"
    chooser.forget(2)
    assert chooser.choose([0, 2], (b"a", b"ab")) == 0


def test_a_beginning_that_everybody_has_spreads() -> None:
    chooser = Chooser(3)
    wanted = Wanted(ROOM, (b"system prompt",))
    for _ in range(30):
        found = chooser.choose(range(3), wanted.prefixes)
        assert found is not None
        chooser.begin(found, wanted)
    assert max(chooser.running) - min(chooser.running) <= 2


def test_those_with_nothing_to_do_take_turns() -> None:
    chooser, wanted = Chooser(3), Wanted(10.0)
    turns = []
    for _ in range(6):
        found = chooser.choose(range(3))
        assert found is not None
        chooser.begin(found, wanted)
        chooser.end(found, wanted)
        turns.append(found)
    assert turns == [0, 1, 2, 0, 1, 2]


def test_cost_grows_with_what_is_asked_for() -> None:
    assert cost_of(100, 10) < cost_of(100, 100) < cost_of(100, 100, 2) < cost_of(10**6, 100, 2)
    assert cost_of(100, 10**9) == cost_of(100, 1024)
    assert cost_of(100, -5) == cost_of(100, 0)


def _p95(choose: Callable[[Chooser, Wanted, int], int]) -> float:
    """The 95th percentile of the times of 2,000 requests, nine short ones to a long one, on replicas that share evenly.

    A replica works on all its requests at once, and each gets its part: a clock of virtual time for each replica.
    """
    chance, chooser, count = random.Random(0), Chooser(COUNT), 2000
    arrivals, now = [], 0.0
    for number in range(count):
        now += chance.expovariate(0.85 * COUNT / 136)  # requests take 136 on average: the replicas are busy at 85 %
        tokens = 1000 if chance.random() < 0.1 else 40
        arrivals.append((now, number, tokens))
    work: list[list[tuple[float, int]]] = [[] for _ in range(COUNT)]  # (virtual time of the end, request)
    virtual, clock = [0.0] * COUNT, [0.0] * COUNT
    wanted = {number: Wanted(cost_of(0, tokens)) for _, number, tokens in arrivals}
    begun = {number: at for at, number, _ in arrivals}
    times: list[float] = []

    def advance(replica: int, to: float) -> None:
        while work[replica]:
            end, number = work[replica][0]
            finish = clock[replica] + (end - virtual[replica]) * len(work[replica])
            if finish > to:
                virtual[replica] += (to - clock[replica]) / len(work[replica])
                break
            heapq.heappop(work[replica])
            clock[replica], virtual[replica] = finish, end
            chooser.end(replica, wanted[number])
            times.append(finish - begun[number])
        clock[replica] = to

    for at, number, tokens in arrivals:
        for replica in range(COUNT):
            advance(replica, at)
        where = choose(chooser, wanted[number], number)
        chooser.begin(where, wanted[number])
        heapq.heappush(work[where], (virtual[where] + tokens, number))
    for replica in range(COUNT):
        advance(replica, float("inf"))
    assert len(times) == count
    return sorted(times)[int(0.95 * count)]


def test_the_least_loaded_beats_taking_turns_on_p95_with_mixed_lengths() -> None:
    def least(chooser: Chooser, wanted: Wanted, number: int) -> int:
        found = chooser.choose(range(COUNT), wanted.prefixes)
        assert found is not None
        return found

    turns = _p95(lambda chooser, wanted, number: number % COUNT)
    assert _p95(least) < 0.75 * turns

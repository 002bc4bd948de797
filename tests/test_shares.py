"""Steps are shared fairly among callers: nobody waits behind another's crowd, and who is alone gets everything."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.types import FinishReason, Request, SamplingParams, Step
from tests.simulation import VOCAB, Simulation


def crowd(sim: Simulation, caller: str, count: int, prompt: int = 4, max_tokens: int = 12, **more: object) -> list[str]:
    """So many requests of one caller, all at once."""
    return [sim.add(prompt, max_tokens, f"{caller}{number}", caller=caller, **more) for number in range(count)]


def tokens_of(sim: Simulation, step: Step) -> Counter[str]:
    """Tokens that a step computes for each caller."""
    found = Counter[str]()
    for entry in step.sequences:
        found[sim.requests[entry.request_id].caller] += entry.num_new_tokens
    return found


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("swap_space", [0, 100])
def test_item_4_one_request_does_not_wait_behind_the_crowd_of_another_caller(overlap: int, swap_space: int) -> None:
    """All slots are taken by answers that go on for long; the newcomer still begins at once."""
    sim = Simulation(max_num_seqs=4, budget=16, num_blocks=200, overlap=overlap, swap_space=swap_space)
    crowd(sim, "many", 40, max_tokens=60)
    for _ in range(5):
        sim.step()
    assert sim.scheduler.num_running == 4
    sim.add(4, 3, "one", caller="few")
    first = sim.schedule()
    assert "one" in sim.shape(first), "it takes the place of the last of the crowd"
    assert list(first.preempted) == ["many3"]
    assert len(first.sequences) == 4
    sim.update()
    while "one" not in sim.reasons:
        assert "one" in sim.shape(sim.step()) or sim.flying
        if len(sim.flying) > overlap:
            sim.update()
    sim.drain()


def test_item_4_a_long_prompt_does_not_keep_another_callers_waiting() -> None:
    sim = Simulation(max_num_seqs=4, budget=16, num_blocks=400)
    crowd(sim, "long", 6, prompt=200, max_tokens=2)
    for _ in range(3):
        sim.step()
    sim.add(4, 2, "short", caller="few")
    assert sim.shape(sim.step())["short"] == (0, 4, True)
    sim.drain()


def test_item_4_blocks_are_shared_too() -> None:
    """The crowd holds every block; the newcomer gets those of the last of it."""
    sim = Simulation(max_num_seqs=12, budget=80, num_blocks=24, caching=False)
    crowd(sim, "many", 8, prompt=9, max_tokens=20)
    sim.step()
    assert sim.pool.num_free == 0
    sim.add(8, 4, "one", caller="few")
    step = sim.step()
    assert "one" in sim.shape(step)
    assert list(step.preempted) == ["many7"]
    sim.drain()


def test_item_4_a_caller_who_is_alone_gets_everything() -> None:
    """Step by step the same as without callers, whatever the weight."""
    named, plain = (Simulation(max_num_seqs=4, budget=16) for _ in range(2))
    for number in range(12):
        named.add(5 + number % 7, 6, str(number), caller="me", weight=0.25)
        plain.add(5 + number % 7, 6, str(number))
    while plain.scheduler.has_work:
        assert named.shape(named.step()) == plain.shape(plain.step())
    named.check_end()


@pytest.mark.parametrize(("weight", "expected"), [(1.0, 1.0), (3.0, 3.0)])
def test_item_4_tokens_are_served_by_weight(weight: float, expected: float) -> None:
    """Both have a queue throughout; one asks for long answers, the other for short ones."""
    sim = Simulation(max_num_seqs=8, budget=32, num_blocks=400, max_waiting=1000)
    crowd(sim, "heavy", 150, max_tokens=16, weight=weight)
    crowd(sim, "light", 300, max_tokens=8)
    served = Counter[str]()
    for _ in range(150):
        served += tokens_of(sim, sim.step())
    assert served["heavy"] / served["light"] == pytest.approx(expected, rel=0.25)
    sim.drain()


def test_item_4_more_callers_than_slots_take_turns() -> None:
    """The first caller came first with everything it has; still nobody has three answers before all have one."""
    sim = Simulation(max_num_seqs=2, budget=16, num_blocks=64)
    callers = [f"c{number}-" for number in range(6)]
    for caller in callers:
        crowd(sim, caller, 5, max_tokens=4)
    ended = Counter[str]()
    while len(ended) < len(callers):
        sim.step()
        ended = Counter(sim.requests[name].caller for name in sim.reasons)
        assert max(ended.values(), default=0) <= 2
    sim.drain()


def test_item_4_who_gave_way_comes_back_before_later_requests_of_its_caller() -> None:
    sim = Simulation(max_num_seqs=2, budget=16, num_blocks=64)
    crowd(sim, "many", 4, max_tokens=30)
    sim.step()
    sim.add(4, 2, "one", caller="few")
    assert list(sim.step().preempted) == ["many1"]
    while "one" not in sim.reasons:
        sim.step()
    assert "many1" in sim.shape(sim.step())
    sim.drain()


def test_item_4_priorities_pass_callers() -> None:
    sim = Simulation(max_num_seqs=1, budget=16)
    sim.add(4, 20, "running", caller="a")
    sim.step()
    sim.add(4, 4, "usual", caller="b")
    sim.add(4, 4, "urgent", caller="c", priority=-1)
    assert "urgent" in sim.shape(sim.step())
    sim.drain()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    counts=st.lists(st.integers(1, 12), min_size=2, max_size=5),
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=5, max_size=5),
    max_num_seqs=st.integers(1, 6),
    num_blocks=st.integers(13, 40),
)
def test_item_4_nobody_starves(
    counts: list[int], lengths: list[tuple[int, int]], max_num_seqs: int, num_blocks: int
) -> None:
    """The first request of each caller ends after no more work than a few requests of every caller make."""
    sim = Simulation(max_num_seqs=max_num_seqs, budget=max_num_seqs + 8, num_blocks=num_blocks, caching=False)
    for number, count in enumerate(counts):
        prompt, max_tokens = lengths[number]
        crowd(sim, f"c{number}-", count, prompt=prompt, max_tokens=max_tokens)
    bound = 4 * len(counts) * sum(sum(lengths[number]) for number in range(len(counts)))
    firsts, steps = {f"c{number}-0" for number in range(len(counts))}, 0
    while not firsts <= sim.reasons.keys():
        sim.step()
        sim.scheduler.assert_consistent()
        steps += 1
        assert steps < bound
    sim.drain()


def test_item_2_answers_to_one_prompt_keep_its_place() -> None:
    """The others of n answers come in when the first has computed the prompt: before requests that came later."""
    sim = Simulation(max_num_seqs=2, budget=16, num_blocks=64)

    def answer(name: str) -> Request:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        return Request(request_id=name, prompt_token_ids=(VOCAB,) * 4, params=params)

    arrival = sim.scheduler.add(answer("n0"))
    later = sim.add(4, 3, "later")
    sim.scheduler.schedule()
    for name in ("n1", "n2", "n3"):
        sim.scheduler.add(answer(name), arrival=arrival)
    sim.scheduler.assert_consistent()
    waiting = [each.request.request_id for each in sim.scheduler._waiting]
    assert later not in waiting, "it runs"
    sim.scheduler.add(answer("last"))
    waiting = [each.request.request_id for each in sim.scheduler._waiting]
    assert waiting == ["n1", "n2", "n3", "last"]


def test_item_1_a_request_for_the_prompt_alone_ends_with_it() -> None:
    sim = Simulation(budget=8, num_blocks=16)
    longest = sim.num_blocks * sim.block_size
    name = sim.add(longest, max_tokens=0)
    steps = 0
    while name not in sim.reasons:
        sim.step()
        steps += 1
    assert steps == longest // 8, "it is chopped like any other"
    assert sim.answers[name] == []
    assert sim.reasons[name] is FinishReason.LENGTH
    sim.check_end()


# Callers who keep coming


class Traffic:
    """Callers with so many requests each at any time: one that ends is followed by the next."""

    def __init__(self, sim: Simulation, **callers: tuple[int, int, int, float]) -> None:
        """callers: name -> (requests at a time, prompt, new tokens, weight)"""
        self.sim, self.callers = sim, callers
        self.numbers = Counter[str]()
        self.served = Counter[str]()
        self.absent: set[str] = set()

    def step(self) -> None:
        sim = self.sim
        for caller, (count, prompt, new, weight) in self.callers.items():
            live = sum(
                request.caller == caller and name not in sim.reasons and name not in sim.aborted
                for name, request in sim.requests.items()
            )
            for _ in range(0 if caller in self.absent else count - live):
                self.numbers[caller] += 1
                sim.add(prompt, new, f"{caller}{self.numbers[caller]}", caller=caller, weight=weight)
        self.served += tokens_of(sim, sim.step())
        sim.scheduler.assert_consistent()
        for name in [name for name in sim.reasons if name in sim.requests]:
            del sim.requests[name], sim.answers[name]

    def run(self, steps: int) -> Counter[str]:
        self.served.clear()
        for _ in range(steps):
            self.step()
        return self.served


@pytest.mark.parametrize(
    ("slots", "crowd_of", "weight"),
    [(1, {"a": (3, 2, 6, 2.0)}, 1.0), (2, {"a": (9, 2, 6, 3.0)}, 1.0), (3, {"a": (9, 2, 6, 1.0)}, 0.25)],
)
def test_item_4_no_weight_starves_another_caller(slots: int, crowd_of: dict[str, Any], weight: float) -> None:
    sim = Simulation(max_num_seqs=slots, budget=slots + 8, num_blocks=64)
    served = Traffic(sim, **crowd_of, light=(1, 2, 6, weight)).run(600)
    heavy = crowd_of["a"][3]
    assert served["light"] / served["a"] > 0.4 * weight / heavy


def test_item_4_a_light_key_among_many_ordinary_ones_is_served() -> None:
    sim = Simulation(max_num_seqs=16, budget=24, num_blocks=200)
    ordinary = {f"k{number}-": (3, 2, 6, 1.0) for number in range(8)}
    served = Traffic(sim, **ordinary, batch=(4, 2, 6, 0.25)).run(400)
    assert served["batch"] > 0.1 * served["k0-"]


@pytest.mark.parametrize(("slots", "hoppers"), [(1, 2), (2, 3), (4, 5)])
def test_item_4_callers_who_come_and_go_do_not_starve_one_who_stays(slots: int, hoppers: int) -> None:
    sim = Simulation(max_num_seqs=slots, budget=slots + 8, num_blocks=64, caching=False)
    names = [f"h{number}-" for number in range(hoppers)]
    traffic = Traffic(sim, stays=(2, 4, 40, 1.0), **dict.fromkeys(names, (1, 1, 2, 1.0)))
    traffic.absent = set(names)
    traffic.run(20)
    for turn in range(400):
        traffic.absent = {name for number, name in enumerate(names) if number % 2 == turn % 2}
        traffic.step()
    assert traffic.served["stays"] > 100


@pytest.mark.parametrize("spare", [0, 1])
def test_item_4_a_newcomer_needs_no_spare_token(spare: int) -> None:
    """The defaults of a CPU: as many tokens in a step as slots, all taken by long answers."""
    sim = Simulation(max_num_seqs=4, budget=4 + spare, num_blocks=200)
    crowd(sim, "many", 8, prompt=1, max_tokens=60)
    for _ in range(12):
        sim.step()
    sim.add(1, 3, "one", caller="few")
    assert "one" in sim.shape(sim.step())
    sim.drain()


def test_item_4_a_prompt_that_waits_for_blocks_is_passed_but_not_for_ever() -> None:
    """One caller's huge prompt does not fit beside a long answer; small requests of others come in meanwhile."""
    sim = Simulation(max_num_seqs=4, budget=16, num_blocks=20, caching=False)
    sim.add(4, 36, "running", caller="a")
    sim.step()
    sim.add(60, 8, "huge", caller="b")
    sim.add(4, 2, "small", caller="c")
    assert "small" in sim.shape(sim.step())
    number = 0
    while "huge" not in sim.reasons:
        if f"s{number}" not in sim.requests or f"s{number}" in sim.reasons:
            number += 1
            sim.add(4, 2, f"s{number}", caller="c")
        sim.step()
        assert number < 60
    sim.drain()


@pytest.mark.parametrize("callers", [1, 2, 16, 60])
def test_item_4_prompts_are_not_slower_for_having_many_owners(callers: int) -> None:
    """Two slots: who waits takes nothing from those who run."""
    sim = Simulation(max_num_seqs=2, budget=64, num_blocks=200, caching=False)
    for number in range(60):
        sim.add(100, 1, caller=f"c{number % callers}")
    assert sim.drain() < 1.2 * 60 * 100 / 64


def test_item_4_vectors_are_not_begun_again_and_again() -> None:
    """A prompt that has to be computed whole gives way to the tiny requests of a heavier key at most once."""
    sim = Simulation(max_num_seqs=2, budget=6, num_blocks=100)
    crowd(sim, "slow", 2, prompt=160, max_tokens=0, params={"prompt_logprobs": 1})
    steps = 0
    while not {"slow0", "slow1"} <= sim.reasons.keys():
        if steps % 5 == 0:
            sim.add(1, 1, caller="tiny", weight=2.0)
        sim.step()
        steps += 1
        assert steps < 300
    sim.drain()


def test_item_4_blocks_that_are_shared_are_not_counted_twice() -> None:
    """Nobody gives way where that would not free enough blocks."""
    sim = Simulation(max_num_seqs=8, budget=200, num_blocks=52)
    shared = [VOCAB + 500] * 160
    for number in range(5):
        sim.add([*shared, 900 + number], 20, f"a{number}", caller="a")
        sim.step()
    assert sim.scheduler.num_running == 5
    sim.add(190, 4, "large", caller="b")
    assert not sim.step().preempted
    sim.drain()

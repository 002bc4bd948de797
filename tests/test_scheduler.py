"""The scheduler's rules, on a runner that reads every page: a lost, moved or stale token changes the answer."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outpace.cache.block_pool import BlockPool, block_hashes
from outpace.errors import ConfigError, InputError, OutpaceError, Overloaded
from outpace.scheduler import Scheduler
from outpace.types import (
    FinishReason,
    Preemption,
    Request,
    SamplingParams,
    Way,
)
from tests.simulation import (
    EOS,
    VOCAB,
    Simulation,
    alone,
    crowd,
    crowded,
    first_preemption,
)
from tests.untraced import untraced

# The budget


def test_a_long_prompt_is_chopped_and_only_its_last_chunk_samples() -> None:
    sim = Simulation(budget=16)
    name = sim.add(40, max_tokens=2)
    assert [sim.shape(sim.step()) for _ in range(4)] == [
        {name: (0, 16, False)},
        {name: (16, 16, False)},
        {name: (32, 8, True)},
        {name: (40, 1, True)},
    ]
    assert sim.reasons == {name: FinishReason.LENGTH}
    sim.check_end()


def test_running_requests_come_first_and_waiting_ones_are_chopped_to_what_is_left() -> None:
    sim = Simulation(budget=16, chunk=16)
    first, second = sim.add(6), sim.add(30)
    assert sim.shape(sim.step()) == {first: (0, 6, True), second: (0, 10, False)}
    third = sim.add(5)
    assert sim.shape(sim.step()) == {first: (6, 1, True), second: (10, 15, False)}
    assert sim.shape(sim.step()) == {first: (7, 1, True), second: (25, 5, True), third: (0, 5, True)}
    sim.drain()


def test_no_more_requests_run_than_allowed() -> None:
    sim = Simulation(max_num_seqs=3)
    for _ in range(10):
        sim.add(2)
    assert len(sim.step().sequences) == 3
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (3, 7)
    sim.drain()


def test_a_long_prompt_takes_no_more_than_its_share_beside_decodes() -> None:
    sim = Simulation(budget=16, num_blocks=200)
    decodes = [sim.add(1, max_tokens=40) for _ in range(3)]
    sim.step()
    long, short = sim.add(300), sim.add(4)
    shape = sim.shape(sim.step())
    assert shape[long] == (0, 4, False)  # a quarter
    assert shape[short] == (0, 4, True)  # which stands behind it
    assert all(shape[name][1] == 1 for name in decodes)
    for name in (*decodes, short):
        sim.abort(name)
    assert sim.shape(sim.step()) == {long: (4, 16, False)}


def test_a_prompt_that_goes_first_leaves_a_token_for_everyone() -> None:
    sim = Simulation(budget=16, chunk=16)
    decodes = [sim.add(1, max_tokens=30, priority=1) for _ in range(7)]
    sim.step()
    long = sim.add(100, priority=0)
    sim.step()
    shape = sim.shape(sim.step())
    assert list(shape) == [long, *decodes]
    assert [tokens for _, tokens, _ in shape.values()] == [9, *[1] * 7]


# What is refused


@pytest.mark.parametrize(("prompt", "max_tokens"), [(10, 8), (17, 1), (1, 17), (100, 100)])
def test_a_request_that_could_never_fit_is_refused(prompt: int, max_tokens: int) -> None:
    scheduler = Scheduler(BlockPool(4, 4), max_num_seqs=4, max_num_batched_tokens=8, max_model_len=999, max_waiting=9)
    with pytest.raises(InputError, match="cache of 16 tokens"):
        scheduler.check(
            Request(request_id="a", prompt_token_ids=(1,) * prompt, params=SamplingParams(max_tokens=max_tokens))
        )


@pytest.mark.parametrize(("prompt", "max_tokens"), [(16, 1), (1, 16), (9, 8)])
def test_a_request_that_just_fits_runs_to_its_end(prompt: int, max_tokens: int) -> None:
    sim = Simulation(num_blocks=4)
    sim.add(prompt, max_tokens=max_tokens)
    sim.drain()


def test_more_tokens_than_the_model_knows_are_refused() -> None:
    scheduler = Scheduler(BlockPool(99, 4), max_num_seqs=4, max_num_batched_tokens=8, max_model_len=20, max_waiting=9)
    scheduler.check(Request(request_id="a", prompt_token_ids=(1,) * 10, params=SamplingParams(max_tokens=10)))
    with pytest.raises(InputError, match="max_model_len=20"):
        scheduler.check(Request(request_id="b", prompt_token_ids=(1,) * 10, params=SamplingParams(max_tokens=11)))


def test_a_full_queue_says_so_and_takes_requests_again_later() -> None:
    sim = Simulation(max_waiting=2)
    sim.add(4)
    sim.add(4)
    with pytest.raises(Overloaded, match="max_waiting=2"):
        sim.add(4)
    assert issubclass(Overloaded, OutpaceError)
    sim.step()
    sim.add(4)
    sim.drain()
    assert len(sim.reasons) == 3


def test_an_id_is_in_use_until_its_last_step_is_updated() -> None:
    sim = Simulation()
    sim.add(4, name="a")
    with pytest.raises(InputError, match="in use"):
        sim.add(4, name="a")
    sim.schedule()
    sim.abort("a")
    with pytest.raises(InputError, match="in use"):
        sim.add(4, name="a")
    sim.update()
    sim.scheduler.add(sim.requests["a"])
    sim.scheduler.assert_consistent()


@pytest.mark.parametrize("tokens", [(), None, "text", (1.5,), (2**70,), (-1,), ((1,),)])
def test_a_prompt_is_token_ids(tokens: Any) -> None:
    with pytest.raises(InputError, match="prompt_token_ids"):
        Request(request_id="a", prompt_token_ids=tokens)


def test_a_list_of_token_ids_is_frozen() -> None:
    assert Request(request_id="a", prompt_token_ids=[1, 2]).prompt_token_ids == (1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"max_num_seqs": 9}, "max_num_batched_tokens=8"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_chunk_beside_decodes": 0}, "max_chunk_beside_decodes"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, int], match: str) -> None:
    right: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 20, "max_waiting": 9}
    with pytest.raises(ConfigError, match=match):
        Scheduler(BlockPool(4, 4), **(right | wrong))


# The end of an answer


def test_an_answer_ends_with_a_stop_token_that_counts() -> None:
    free = Simulation()
    free.add([1], max_tokens=12)
    free.drain()
    answer = free.answers["0"]
    stop = answer[3]
    first = answer.index(stop)
    for params, length, reason in (
        ({"ignore_eos": True, "stop_token_ids": (stop,)}, first + 1, FinishReason.STOP),
        ({"ignore_eos": True, "stop_token_ids": (stop,), "min_tokens": first}, first + 1, FinishReason.STOP),
        ({"ignore_eos": True}, 12, FinishReason.LENGTH),
    ):
        sim = Simulation()
        sim.add([1], max_tokens=12, params=params)
        sim.drain()
        assert (sim.answers["0"], sim.reasons["0"]) == (answer[:length], reason)
    sim = Simulation()
    sim.add([1], max_tokens=12, params={"ignore_eos": True, "stop_token_ids": (stop,), "min_tokens": first + 1})
    sim.drain()
    assert len(sim.answers["0"]) > first + 1


def test_the_models_own_end_counts_unless_it_is_ignored() -> None:
    prompt = next([seed, 5] for seed in range(99) if EOS in alone_tokens([seed, 5])[:8])
    for ignore, reason in ((False, FinishReason.STOP), (True, FinishReason.LENGTH)):
        sim = Simulation()
        sim.add(prompt, max_tokens=9, params={"ignore_eos": ignore})
        sim.drain()
        assert sim.reasons["0"] is reason


def alone_tokens(prompt: list[int]) -> list[int]:
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    return alone(Request(request_id="", prompt_token_ids=tuple(prompt), params=params))[0]


def test_the_runner_is_told_once_who_has_ended() -> None:
    sim = Simulation()
    first, second = sim.add(4, max_tokens=1), sim.add(4, max_tokens=9)
    sim.step()
    sim.abort(second)
    assert sim.step().ended == [first, second]
    assert sim.step().ended == []
    assert not sim.runner.rows


# Preemption


def test_the_newest_gives_way_and_all_end() -> None:
    sim, names = crowded()
    assert first_preemption(sim).preempted == {names[2]: Preemption.RECOMPUTE}
    sim.drain()


def test_the_last_priority_gives_way_first() -> None:
    sim = Simulation(num_blocks=12, budget=48)
    names = [sim.add(15, max_tokens=20, priority=priority) for priority in (1, 0, 0)]
    assert first_preemption(sim).preempted == {names[0]: Preemption.RECOMPUTE}
    sim.drain()


def test_recompute_starts_behind_what_is_still_cached() -> None:
    for caching in (True, False):
        sim, names = crowded(caching=caching)
        first_preemption(sim)
        sim.abort(names[0])
        known = (*sim.requests[names[2]].prompt_token_ids, *sim.answers[names[2]])
        (back,) = (entry for entry in sim.step().sequences if entry.request is not None)
        assert back.request_id == names[2]
        assert (back.start > 0) == caching
        assert back.token_ids == known
        sim.drain()


def test_swap_keeps_what_was_computed() -> None:
    sim, names = crowded(swap_space=12)
    step = first_preemption(sim)
    assert step.preempted == {names[2]: Preemption.SWAP}
    (store,) = step.copies
    assert store.way is Way.STORE
    assert len({source for source, _ in store.pairs}) == len(store.pairs) == 4
    sim.abort(names[0])
    (load,) = sim.step().copies
    assert load.way is Way.LOAD
    assert [source for source, _ in load.pairs] == [target for _, target in store.pairs]
    (back,) = (entry for entry in sim.step().sequences if entry.request is not None)
    assert [target for _, target in load.pairs] == list(back.new_blocks[:4])
    assert back.start == 16
    assert sim.scheduler.tiers.host.num_free == 12
    hashes = block_hashes(back.token_ids, sim.block_size, "\0")
    assert len(sim.pool.match(hashes)) == len(hashes) == 4  # those that were overwritten meanwhile are back too
    sim.drain()


def test_without_room_in_host_memory_it_is_recompute() -> None:
    sim, names = crowded(swap_space=3)
    step = first_preemption(sim)
    assert step.preempted == {names[2]: Preemption.RECOMPUTE}
    assert not step.copies
    sim.drain()


@pytest.mark.parametrize("swap_space", [0, 12])
def test_who_was_preempted_comes_back_before_anyone_new(swap_space: int) -> None:
    sim, names = crowded(swap_space=swap_space)
    first_preemption(sim)
    small = sim.add(1, max_tokens=1)
    starts: list[str] = []
    while small not in starts:
        starts += [entry.request_id for entry in sim.step().sequences if entry.request is not None]
    assert starts.index(names[2]) < starts.index(small)
    sim.drain()


def test_nobody_is_let_in_whose_tokens_do_not_fit_beside_those_of_others() -> None:
    sim = Simulation(num_blocks=12, budget=16)
    decode = sim.add(1, max_tokens=40)
    sim.step()
    first, second = sim.add(32, max_tokens=1), sim.add(13, max_tokens=1)
    for _ in range(8):  # four tokens each time; nine of twelve blocks will be in use, and four are wanted
        assert list(sim.shape(sim.step())) == [decode, first]
    assert list(sim.shape(sim.step())) == [decode, second]
    assert not any(step.preempted for step in sim.steps)
    sim.drain()


def test_nobody_overtakes_the_first_that_waits() -> None:
    sim = Simulation(num_blocks=8, budget=32)
    first, large, small = sim.add(20, max_tokens=8), sim.add(24, max_tokens=4), sim.add(1)
    assert list(sim.shape(sim.step())) == [first]
    assert list(sim.shape(sim.step())) == [first]
    sim.abort(large)
    assert list(sim.shape(sim.step())) == [first, small]


def test_smaller_priorities_come_sooner_and_equal_ones_in_order() -> None:
    sim = Simulation(max_num_seqs=1)
    priorities = [5, 0, 5, -3, 0]
    names = [sim.add(2, max_tokens=2, priority=priority) for priority in priorities]
    sim.drain()
    starts = [entry.request_id for step in sim.steps for entry in step.sequences if entry.request is not None]
    assert starts == [names[3], names[1], names[4], names[0], names[2]]


# Aborts


def test_an_abort_works_wherever_the_request_is() -> None:
    sim, names = crowded(swap_space=12, max_waiting=9)
    waiting = sim.add(1)
    assert sim.abort(waiting)
    first_preemption(sim)
    assert sim.scheduler.tiers.host.num_free == 8
    assert sim.abort(names[2])  # swapped
    assert sim.scheduler.tiers.host.num_free == 12
    assert sim.abort(names[0])  # running
    sim.scheduler.assert_consistent()
    sim.drain()
    assert sim.reasons.keys() == {names[1]}


def test_an_abort_of_what_has_ended_or_never_was_changes_nothing() -> None:
    sim = Simulation()
    name = sim.add(4, max_tokens=1)
    assert not sim.abort("nobody")
    sim.step()
    assert not sim.abort(name)
    other = sim.add(4)
    sim.schedule()
    assert sim.abort(other)
    assert not sim.abort(other)
    sim.update()
    assert not sim.abort(other)
    sim.check_end()


def test_blocks_in_flight_are_given_back_with_the_last_step() -> None:
    sim = Simulation(num_blocks=8)
    name = sim.add(4, max_tokens=9)
    sim.schedule()
    sim.schedule()
    sim.abort(name)
    assert sim.pool.num_free == 6
    assert sim.update() == []
    assert sim.pool.num_free == 6
    assert sim.scheduler.has_work
    assert sim.update() == []
    sim.check_end()


# One step ahead


def test_a_decode_does_not_wait_for_the_token_before() -> None:
    sim = Simulation()
    name = sim.add(4, max_tokens=3)
    shapes = [sim.shape(sim.schedule()) for _ in range(4)]
    assert shapes == [{name: (0, 4, True)}, {name: (4, 1, True)}, {name: (5, 1, True)}, {}]  # the length is known
    assert [len(sim.update()) for _ in range(4)] == [1, 1, 1, 0]
    sim.check_end()


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_stages_all_have_a_step(depth: int) -> None:
    sim = Simulation(depth=depth, overlap=depth - 1, max_num_seqs=7, budget=32)
    for _ in range(7):
        sim.add(3, max_tokens=40)
    for _ in range(4 * depth):
        sim.step()
    for _ in range(3):
        round_of = [sim.step() for _ in range(depth)]
        served = Counter(entry.request_id for step in round_of for entry in step.sequences)
        assert len(served) == 7
        assert set(served.values()) == {1}
        assert max(len(step.sequences) for step in round_of) == -(-7 // depth)
    sim.drain()


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    sim = Simulation(depth=3, overlap=2, budget=8, max_num_seqs=2)
    sim.add(22, max_tokens=2)
    assert [sim.shape(sim.schedule()) for _ in range(4)] == [
        {"0": (0, 8, False)}, {"0": (8, 8, False)}, {"0": (16, 6, True)}, {}
    ]  # fmt: skip
    sim.drain()


def test_the_extra_token_of_a_finished_request_is_ignored() -> None:
    sim = Simulation(overlap=1)
    stop = alone_tokens([7, 7])[0]
    name = sim.add([7, 7], max_tokens=9, params={"ignore_eos": True, "stop_token_ids": (stop,)})
    sim.step()
    assert list(sim.shape(sim.step())) == [name]  # its end is not known when this step is made
    assert sim.reasons == {name: FinishReason.STOP}
    assert sim.pool.num_free < sim.num_blocks
    assert sim.step().ended == [name]
    sim.update()
    assert sim.answers[name] == [stop]
    sim.check_end()


@pytest.mark.parametrize("swap_space", [0, 12])
def test_a_preempted_request_comes_back_when_its_last_token_is_known(swap_space: int) -> None:
    sim, names = crowded(swap_space=swap_space)
    while not sim.schedule().preempted:
        if len(sim.flying) > 1:
            sim.update()
    sim.abort(names[0])
    sim.abort(names[1])
    known = len(sim.answers[names[2]])
    assert sim.shape(sim.schedule()) == {}
    while sim.flying:
        sim.update()
    assert len(sim.answers[names[2]]) == known + 1  # what it was sampling when it gave way is not lost
    if swap_space:
        sim.step()  # loads its blocks
    assert list(sim.shape(sim.schedule())) == [names[2]]
    sim.update()
    sim.drain()


def test_a_request_that_ends_after_it_was_preempted_does_not_come_back() -> None:
    for swap_space in (0, 12):
        sim, names = crowded(swap_space=swap_space)
        while not sim.schedule().preempted:
            if len(sim.flying) > 1:
                sim.update()
        sequence = sim.scheduler._sequences[names[2]]
        sequence.stops = frozenset(range(VOCAB))
        assert sequence in {each for each, _ in sim.update()}
        assert sim.reasons == {names[2]: FinishReason.STOP}
        sim.scheduler.assert_consistent()
        assert sim.scheduler.num_waiting == 0


def test_steps_are_updated_in_order() -> None:
    sim = Simulation()
    sim.add(4)
    sim.schedule()
    sim.schedule()
    with pytest.raises(AssertionError, match="step 0 has to be updated before step 1"):
        sim.scheduler.update(sim.flying[1][1])


# Prefixes


def test_a_prefix_is_found_but_never_the_whole_prompt() -> None:
    sim = Simulation(budget=32)
    prompt = list(range(1, 13))
    sim.add(prompt, max_tokens=1)
    sim.drain()
    for tokens, start in ((prompt, 8), ([*prompt, 5], 12), (prompt[:11], 8), ([9, *prompt], 0), (prompt[:4], 0)):
        name = sim.add(tokens, max_tokens=1)
        assert sim.shape(sim.step())[name] == (start, len(tokens) - start, True)
        sim.drain()


def test_answers_are_found_too() -> None:
    sim = Simulation()
    name = sim.add([1, 2, 3], max_tokens=10)
    sim.drain()
    follow = sim.add([1, 2, 3, *sim.answers[name], 5])
    assert sim.shape(sim.step())[follow][0] == 12
    sim.drain()


def test_samples_of_one_prompt_share_its_blocks() -> None:
    sim = Simulation(num_blocks=16, budget=32)
    prompt = list(range(17))
    sim.add(prompt, max_tokens=5)
    sim.step()
    for _ in range(5):
        sim.add(prompt, max_tokens=5)
    entries = sim.step().sequences
    assert [entry.start for entry in entries[1:]] == [16] * 5
    assert sim.num_blocks - sim.pool.num_free == 4 + 6
    sim.drain()


def test_blocks_are_shared_when_they_are_computed_not_before() -> None:
    sim = Simulation(budget=64)
    first = sim.add(list(range(20)), max_tokens=1)
    sim.schedule()
    second = sim.add(list(range(20)), max_tokens=1)
    assert sim.shape(sim.schedule()) == {second: (0, 20, True)}
    sim.update()
    third = sim.add(list(range(20)), max_tokens=1)
    assert sim.shape(sim.schedule()) == {third: (16, 4, True)}
    sim.drain()
    assert first in sim.reasons


def test_another_salt_or_model_shares_nothing() -> None:
    sim = Simulation(budget=64)
    prompt = list(range(20))
    sim.add(prompt, max_tokens=1)
    sim.drain()
    for salt, start in (("mine", 0), ("mine", 16), ("\ud800", 0), ("", 16)):
        name = sim.add(prompt, max_tokens=1, cache_salt=salt)
        assert sim.shape(sim.step())[name][0] == start
    sim.scheduler.model = "other"
    name = sim.add(prompt, max_tokens=1)
    assert sim.shape(sim.step())[name][0] == 0


# Crowds


@pytest.mark.parametrize(("overlap", "depth"), [(0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (2, 3), (4, 4)])
@pytest.mark.parametrize("swap_space", [0, 8, 100])
@pytest.mark.parametrize("caching", [True, False])
def test_ten_times_the_cache_ends_with_nothing_lost(overlap: int, depth: int, swap_space: int, caching: bool) -> None:
    sim = crowd(3, overlap=overlap, depth=depth, swap_space=swap_space, caching=caching)
    demand = sum(len(request.prompt_token_ids) + request.max_tokens for request in sim.requests.values())
    assert demand > 10 * sim.num_blocks * sim.block_size * 2
    sim.drain()
    assert any(step.preempted for step in sim.steps)
    assert len(sim.reasons) == 60


def test_prompts_that_arrive_together_do_not_deadlock() -> None:
    """FastGen's case: all prompts are in, the cache is full, and nobody has a block for the next token."""
    sim = Simulation(num_blocks=8, budget=32, max_num_seqs=8, caching=False)
    for _ in range(8):
        sim.add(3, max_tokens=28)
    assert len(sim.step().sequences) == 8
    assert len(sim.step().sequences) == 8
    assert sim.pool.num_free == 0
    assert sim.drain() < 8 * 32


@dataclass
class Life:
    """Random calls, with every invariant checked after each."""

    sim: Simulation
    rng: random.Random
    streamed: float
    num_operations: int = 0

    def act(self) -> None:
        action, rng, sim = self.rng.random(), self.rng, self.sim
        if action < 0.2:
            self.add()
        elif action < 0.23 and sim.requests:
            sim.abort(rng.choice(list(sim.requests)[-12:]))
        elif action < 0.6 and len(sim.flying) <= sim.overlap:
            sim.schedule()
        elif sim.flying:
            sim.update()
        sim.scheduler.assert_consistent()
        self.num_operations += 1

    def add(self) -> None:
        rng, sim = self.rng, self.sim
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9][: rng.randrange(10)] + [
            rng.randrange(3) for _ in range(rng.randrange(1, 9))
        ]
        if rng.random() < 0.4 and sim.requests:  # a conversation goes on
            before = rng.choice(list(sim.requests)[:40])
            prompt = [*sim.requests[before].prompt_token_ids, *sim.answers[before], *prompt[-2:]]
        max_tokens, room = rng.randrange(28), sim.num_blocks * sim.block_size
        more: dict[str, Any] = {"priority": rng.choice((0, 0, 0, 1, -1)), "cache_salt": rng.choice(("", "", "salt"))}
        more["caller"] = rng.choice(("", "", "a", "b"))
        more["weight"] = 2.0 if more["caller"] == "b" else 1.0
        more["streamed"] = rng.random() < self.streamed
        try:
            sim.add(prompt, max_tokens, params={"ignore_eos": rng.random() < 0.7}, **more)
        except InputError:
            assert len(prompt) + max(max_tokens, 1) - 1 > room
        except Overloaded:
            assert sim.scheduler.num_waiting >= sim.max_waiting


def random_simulation(rng: random.Random) -> Simulation:
    max_num_seqs = rng.randrange(1, 9)
    budget = max_num_seqs + rng.randrange(20)
    levels: dict[str, Any] = {"swap_space": rng.choice((0, 3, 12))}
    if rng.random() < 0.5:
        levels = {"kv": rng.choice((2, 9, 40)), "kv_files": rng.choice((0, 5, 60)), "slow": random.Random(rng.random())}
        levels["broken_files"] = rng.choice((0.0, 0.3))
    return Simulation(
        **levels,
        num_blocks=rng.randrange(4, 16),
        block_size=rng.choice((1, 2, 4, 5)),
        max_num_seqs=max_num_seqs,
        budget=budget,
        streamed_budget=rng.choice((None, rng.randint(max_num_seqs, budget))),
        longest_first=rng.random() < 0.3,
        padded=rng.choice(((), (3, 6, 9, 12))),
        caching=rng.random() < 0.7,
        overlap=rng.choice((0, 1, 1, 2)),
        depth=rng.choice((1, 1, 2, 3)),
        max_waiting=rng.randrange(1, 20),
        chunk=rng.choice((None, 1, 5)),
    )


def test_long_random_lives() -> None:
    total, seen = 0, Counter[str]()
    for seed in range(120):
        rng = random.Random(seed)
        life = Life(random_simulation(rng), rng, streamed=rng.choice((0.0, 0.3, 1.0)))
        sim = life.sim
        with untraced():
            for _ in range(900):
                life.act()
            sim.drain()
        total += life.num_operations
        seen.update(kind for step in sim.steps for kind in step.preempted.values())
        seen["finished"] += len(sim.reasons)
        seen["aborted"] += len(sim.aborted)
        seen["cached"] += sum(entry.start > 0 for step in sim.steps for entry in step.sequences if entry.request)
        seen.update(copy.way for step in sim.steps for copy in step.copies)
        seen["host hits"] += sim.scheduler.totals.tiers.host_hits
        seen["file hits"] += sim.scheduler.totals.tiers.file_hits
        seen["failed"] += sim.tiers.totals.failed
    assert total >= 100_000
    assert len(seen) == 12
    assert min(seen.values()) > 40, seen  # the lives are not sheltered


class SchedulerMachine(RuleBasedStateMachine):
    sim: Simulation

    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        spare=st.integers(0, 12),
        levels=st.sampled_from([(0, 0, 0), (3, 0, 0), (12, 0, 0), (0, 2, 0), (0, 9, 0), (0, 9, 4), (0, 30, 30)]),
        slow=st.randoms(use_true_random=False),
        broken_files=st.sampled_from([0.0, 0.3]),
        caching=st.booleans(),
        chunk=st.none() | st.integers(1, 4),
        streamed_spare=st.none() | st.integers(0, 12),
        longest_first=st.booleans(),
        depth=st.integers(1, 3),
    )
    def start(
        self, max_num_seqs: int, spare: int, streamed_spare: int | None, levels: tuple[int, int, int], **sizes: Any
    ) -> None:
        sizes |= dict(zip(("swap_space", "kv", "kv_files"), levels, strict=True))
        sizes["streamed_budget"] = None if streamed_spare is None else max_num_seqs + streamed_spare
        self.sim = Simulation(max_num_seqs=max_num_seqs, budget=max_num_seqs + spare, max_waiting=6, overlap=2, **sizes)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(0, 20),
        priority=st.integers(0, 1),
        ignore_eos=st.booleans(),
        more=st.fixed_dictionaries({"caller": st.sampled_from(["", "a", "b", "c"]), "streamed": st.booleans()}),
    )
    def add(self, prompt: list[int], max_tokens: int, priority: int, ignore_eos: bool, more: dict[str, Any]) -> None:
        size, waiting = self.sim.num_blocks * self.sim.block_size, self.sim.scheduler.num_waiting
        try:
            self.sim.add(prompt, max_tokens, priority=priority, params={"ignore_eos": ignore_eos}, **more)
            assert len(prompt) + max(max_tokens, 1) - 1 <= size
            assert waiting < 6
        except InputError:
            assert len(prompt) + max(max_tokens, 1) - 1 > size
        except Overloaded:
            assert waiting >= 6

    @precondition(lambda self: self.sim.requests)
    @rule(index=st.integers(0, 50))
    def abort(self, index: int) -> None:
        names = list(self.sim.requests)
        self.sim.abort(names[-1 - index % len(names)])

    @precondition(lambda self: len(self.sim.flying) < 3)
    @rule()
    def schedule(self) -> None:
        self.sim.schedule()

    @precondition(lambda self: self.sim.flying)
    @rule()
    def update(self) -> None:
        self.sim.update()

    @rule(count=st.integers(1, 12))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.sim.step()

    @invariant()
    def consistent(self) -> None:
        self.sim.scheduler.assert_consistent()

    def teardown(self) -> None:
        self.sim.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, database=None, derandomize=True
)

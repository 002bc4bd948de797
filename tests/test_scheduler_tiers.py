"""Levels of the prefix cache below the device, in the scheduler: on the runner of test_scheduler, whose copies take as
long as a test wants."""

import random
from typing import Any

import pytest

from outpace.sequence import Status
from outpace.types import Copy, Preemption, Step, Way
from tests.simulation import Simulation, crowd, crowded, first_preemption


class Never(random.Random):
    """Copies end only when a step waits for one, or has to run after it."""

    def random(self) -> float:
        return 1.0

    def choice(self, seq: Any) -> Any:
        return seq[0]


def conversation(sim: Simulation, name: str, turns: int = 5) -> list[int]:
    """A prompt of its own, of so many blocks and two tokens."""
    token = 100 + ord(name)
    return [token] * (sim.block_size * turns) + [token, token]


def copies(step: Step, way: Way) -> list[Copy]:
    return [copy for copy in step.copies if copy.way is way]


def stored(**more: Any) -> Simulation:
    """The first turn of conversation "a" is over, in host memory, and not on the device any more."""
    sim = Simulation(**{"num_blocks": 10, "kv": 40, "budget": 64, **more})
    sim.add(conversation(sim, "a"), max_tokens=1)
    sim.drain()
    push_out(sim)
    return sim


def push_out(sim: Simulation, name: str = "x", rounds: int = 1) -> None:
    """Other requests take all blocks of the device; they leave nothing in host memory that is worth a thing."""
    for number in range(rounds):
        sim.add(conversation(sim, chr(ord(name) + number), turns=9), max_tokens=1, name=f"push {name} {number}")
        sim.drain()
        for _ in range(3):  # time for what goes down
            sim.step()


def status(sim: Simulation, name: str) -> Status:
    return sim.scheduler._sequences[name].status


def test_what_the_device_has_lost_comes_from_host_memory() -> None:
    sim = stored()
    name = sim.add([*conversation(sim, "a"), 7, 7], max_tokens=3)
    (load,) = copies(sim.step(), Way.LOAD)
    assert len(load.pairs) == 5
    (entry,) = sim.step().sequences
    assert (entry.request_id, entry.start, entry.num_new_tokens) == (name, 20, 4)
    assert entry.new_blocks[:5] == tuple(target for _, target in load.pairs)
    totals = sim.scheduler.totals
    assert (totals.prefix_hits, totals.tiers.host_hits, totals.tiers.file_hits) == (20, 20, 0)
    sim.drain()


def test_a_block_is_stored_when_it_is_full_and_before_its_request_ends() -> None:
    sim = Simulation(kv=40)
    sim.add(9, max_tokens=20)
    sim.step()
    (store,) = copies(sim.step(), Way.STORE)
    assert len(store.pairs) == 2
    sim.drain()
    push_out(sim)
    assert sim.tiers.totals.copied[Way.STORE] > 7


def test_decodes_go_on_while_others_load_and_nobody_waits_for_copies() -> None:
    sim = Simulation(num_blocks=40, kv=60, budget=64, slow=random.Random(0))
    for each in "abc":
        sim.add(conversation(sim, each), max_tokens=1)
        sim.drain()
    push_out(sim, rounds=5)
    assert len(sim.tiers.host._cached) > 15
    sim.runner.slow = Never()
    decode = sim.add(3, max_tokens=30)
    sim.step()
    names = [sim.add([*conversation(sim, each), 7], max_tokens=2) for each in "abc"]
    for _ in range(20):
        step = sim.step()
        assert list(sim.shape(step)) == [decode]
        assert not step.waits
        assert {status(sim, name) for name in names} == {Status.LOADING}
    assert len(sim.answers[decode]) >= 20
    assert all(sim.scheduler.is_waiting(name) for name in names)
    sim.drain()  # now nobody else is left: steps wait
    assert sim.scheduler.totals.tiers.host_hits >= 60


def test_a_step_waits_only_if_there_is_nothing_else_to_do() -> None:
    sim = stored()
    sim.runner.slow = Never()
    sim.add([*conversation(sim, "a"), 7], max_tokens=1)
    step = sim.schedule()
    assert (step.waits, step.num_tokens) == (True, 0)
    sim.update()
    assert sim.step().num_tokens
    sim.drain()
    assert not sim.schedule().waits
    sim.update()


def test_two_requests_wait_for_one_load_of_their_common_prefix() -> None:
    sim = stored(num_blocks=12)
    sim.runner.slow = Never()
    first = sim.add([*conversation(sim, "a"), 7], max_tokens=2)
    second = sim.add([*conversation(sim, "a"), 8], max_tokens=2)
    step = sim.schedule()
    assert len(copies(step, Way.LOAD)) == 1
    assert status(sim, first) is status(sim, second) is Status.LOADING
    sim.abort(first)  # the second one still gets what was being loaded
    sim.scheduler.assert_consistent()
    sim.update()
    sim.drain()
    assert second in sim.reasons


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_abort_while_loading_keeps_the_blocks_until_the_copy_is_done(overlap: int) -> None:
    sim = stored(overlap=overlap)
    sim.runner.slow = Never()
    name = sim.add([*conversation(sim, "a"), 7], max_tokens=2)
    sim.schedule()
    held = sim.num_blocks - sim.pool.num_free
    assert held == 5
    assert sim.abort(name)
    assert sim.num_blocks - sim.pool.num_free == held
    sim.scheduler.assert_consistent()
    sim.drain()


def test_a_block_that_is_being_stored_is_overwritten_only_after_the_copy() -> None:
    sim = Simulation(num_blocks=8, kv=40, budget=64, slow=Never())
    sim.add(17, max_tokens=1, name="a")
    sim.step()
    sim.add(30, max_tokens=1, name="b")
    step = sim.step()
    (store,) = copies(step, Way.STORE)
    assert step.after == [store.copy_id]
    sim.drain()


def test_preempted_blocks_that_host_memory_has_are_not_copied_again() -> None:
    sim, names = crowded(kv=40)
    step = first_preemption(sim)
    assert step.preempted == {names[2]: Preemption.SWAP}
    kept = sim.scheduler._sequences[names[2]].host_blocks
    swapped = [target for copy in copies(step, Way.STORE) for _, target in copy.pairs if target in kept]
    assert (len(kept), len(swapped)) == (4, 1)
    sim.drain()


def test_preempted_requests_push_idle_prefixes_out_of_host_memory() -> None:
    sim, names = crowded(kv=12)
    assert first_preemption(sim).preempted == {names[2]: Preemption.SWAP}
    sim.drain()
    assert sim.tiers.totals.copied[Way.STORE] > 12


# Files


def filed(**more: Any) -> Simulation:
    """Conversation "a" is in files alone, at least its last blocks."""
    sim = stored(**{"kv": 20, "kv_files": 60, **more})
    push_out(sim, "p", rounds=4)
    return sim


def test_what_host_memory_has_lost_comes_from_files() -> None:
    sim = filed()
    name = sim.add([*conversation(sim, "a"), 7, 7], max_tokens=3)
    (read,) = copies(sim.step(), Way.READ)
    assert len(read.pairs) == 5
    assert copies(sim.step(), Way.LOAD)
    sim.drain()
    totals = sim.scheduler.totals.tiers
    assert (totals.file_hits, totals.host_hits, totals.failed) == (20, 0, 0)
    assert name in sim.reasons


def test_f_9_blocks_that_files_give_back_wrong_are_computed_again() -> None:
    sim = filed()
    sim.runner.broken_files, sim.runner.slow = 1.0, random.Random(0)
    name = sim.add([*conversation(sim, "a"), 7, 7], max_tokens=3)
    sim.drain()  # compares the answers
    assert name in sim.reasons
    assert sim.tiers.totals.failed >= 5
    assert sim.scheduler.totals.tiers.file_hits == 0
    sim.add([*conversation(sim, "a"), 8], max_tokens=1)
    assert not copies(sim.step(), Way.READ), "a block that could not be read is looked for again"
    sim.drain()


def test_others_come_in_while_files_are_read() -> None:
    sim = filed()
    sim.runner.slow = Never()
    away = sim.add([*conversation(sim, "a"), 7, 7], max_tokens=3)
    other = sim.add(3, max_tokens=4)
    assert list(sim.shape(sim.step())) == [other]
    assert status(sim, away) is Status.FETCHING
    assert sim.scheduler.num_waiting == 1
    sim.drain()


def test_an_abort_while_files_are_read_leaves_nothing() -> None:
    sim = filed()
    sim.runner.slow = Never()
    name = sim.add([*conversation(sim, "a"), 7, 7], max_tokens=3)
    sim.schedule()
    assert status(sim, name) is Status.FETCHING
    assert sim.abort(name)
    assert name not in sim.scheduler._sequences
    sim.scheduler.assert_consistent()
    sim.update()
    sim.drain()


def test_two_requests_wait_for_one_read() -> None:
    sim = filed(num_blocks=16)
    sim.runner.slow = Never()
    names = [sim.add([*conversation(sim, "a"), last], max_tokens=2) for last in (7, 8)]
    step = sim.schedule()
    assert len(copies(step, Way.READ)) == 1
    assert {status(sim, name) for name in names} == {Status.FETCHING}
    sim.update()
    sim.drain()
    assert sim.scheduler.totals.tiers.file_hits >= 20


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize(("kv", "kv_files", "broken"), [(8, 0, 0.0), (100, 0, 0.0), (12, 100, 0.0), (12, 30, 0.3)])
def test_l_6_ten_times_the_cache_ends_with_nothing_lost(overlap: int, kv: int, kv_files: int, broken: float) -> None:
    slow = random.Random(overlap)
    sim = crowd(3, overlap=overlap, kv=kv, kv_files=kv_files, slow=slow, broken_files=broken)
    sim.drain()
    assert any(step.preempted for step in sim.steps)
    assert len(sim.reasons) == 60
    assert sim.runner.seen[Way.LOAD] > 0

"""The number of threads on a CPU follows what other programs leave."""

import os
from dataclasses import dataclass, field

import pytest
import torch

import outpace
from outpace.runner.machine import Usage, cores, usage, used_by_others
from outpace.runner.threads import LOOK_EVERY, CpuThreads, choose, for_engine, share
from tests.models import tiny

CPU = torch.device("cpu")


@dataclass
class Machine:
    """Four cores, some of which others keep busy; a clock that is moved by hand."""

    others: float = 0.0
    threads: int = 4
    at: float = 0.0
    everybody: float = 0.0
    own: float = 0.0
    applied: list[int] = field(default_factory=list)
    looks: int = 0

    def go_on(self, seconds: float) -> None:
        """Time passes: others have what they want, and this program the rest, spinning or not."""
        own = min(self.threads, 4 - self.others)
        self.at += seconds
        self.own += own * seconds
        self.everybody += (own + self.others) * seconds

    def look(self) -> Usage:
        """What /proc/stat would say."""
        self.looks += 1
        return Usage(self.at, self.everybody, self.own)

    def apply(self, count: int) -> None:
        """torch.set_num_threads."""
        self.threads = count
        self.applied.append(count)

    def watcher(self, ranks: int = 1) -> CpuThreads:
        """What is tested, on this machine."""
        return CpuThreads(
            look=self.look,
            clock=lambda: self.at,
            apply=self.apply,
            threads=lambda: self.threads,
            cores=lambda: 4,
            ranks=ranks,
        )


def steps(machine: Machine, watcher: CpuThreads, seconds: float) -> int:
    """Steps for a while; the number of threads of the last."""
    end = machine.at + seconds
    while machine.at < end:
        watcher.before_step()
        machine.go_on(0.1)
    return machine.threads


def test_item_15_threads_are_what_others_leave_and_come_back() -> None:
    machine = Machine()
    watcher = machine.watcher()
    assert steps(machine, watcher, 2.0) == 4
    assert machine.applied == [], "alone nothing is changed"
    machine.others = 2.9
    assert steps(machine, watcher, 2.0) == 1
    machine.others = 1.0
    assert steps(machine, watcher, 2.0) == 3
    machine.others = 0.0
    assert steps(machine, watcher, 2.0) == 4
    assert len(machine.applied) <= 6, "it goes to and fro"  # a look may fall into a change


def test_item_15_a_pause_counts_as_time_to_look_at_and_gives_threads_back() -> None:
    machine = Machine(others=3.0)
    watcher = machine.watcher()
    assert steps(machine, watcher, 2.0) == 1
    watcher.idle()
    assert machine.threads == 4, "other code of the process has all threads"
    watcher.before_step()
    assert machine.threads == 1, "right after a pause what was seen before holds"
    watcher.idle()
    machine.others, before = 0.0, machine.looks
    machine.at += 60.0  # alone, and nothing to do
    watcher.before_step()
    assert (machine.threads, machine.looks) == (4, before + 1), "the first step after it has all threads"


def test_item_15_looking_is_rare_and_the_callers_own_choice_counts() -> None:
    machine = Machine()
    watcher = machine.watcher()
    for _ in range(100):
        watcher.before_step()
        machine.go_on(LOOK_EVERY / 100)
    assert machine.looks <= 2
    machine.threads = 1  # the caller: torch.set_num_threads(1)
    assert steps(machine, watcher, 2.0) == 1
    machine.threads = 2
    assert steps(machine, watcher, 2.0) == 2
    assert machine.applied == []


@pytest.mark.parametrize(
    ("now", "free", "wanted"),
    [(2, 1.9, 2), (2, 1.5, 2), (2, 1.4, 1), (2, 0.1, 1), (1, 1.6, 1), (1, 1.8, 2), (1, 9.0, 2), (2, -1.0, 1)],
)
def test_item_15_small_changes_change_nothing(now: int, free: float, wanted: int) -> None:
    assert choose(now, 2, free) == wanted


def test_item_15_what_the_user_fixes_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert for_engine(CPU, deterministic=True) is None
    assert for_engine(torch.device("cuda"), deterministic=False) is None
    assert for_engine(CPU, deterministic=False) is not None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert for_engine(CPU, deterministic=False) is None


def test_item_15_a_system_that_tells_nothing_changes_nothing() -> None:
    machine = Machine(others=4.0)
    watcher = CpuThreads(look=lambda: None, clock=lambda: machine.at, apply=machine.apply, threads=lambda: 4)
    assert steps(machine, watcher, 2.0) == 4


def test_item_15_this_program_is_not_another() -> None:
    before = usage()
    if before is None:
        pytest.skip("the system does not tell")
    end = os.times().user + 0.3
    while os.times().user < end:
        pass
    now = usage()
    assert now is not None
    took = now.at - before.at
    assert now.own - before.own >= 0.25
    assert 0 <= used_by_others(before, now) <= cores() - 0.25 / took + 0.1


def test_item_15_an_engine_looks_before_its_steps_and_rests_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Watcher(CpuThreads):
        def before_step(self) -> None:
            seen.append("step")

        def idle(self) -> None:
            seen.append("idle")

    monkeypatch.setattr("outpace.llm_engine.for_engine", lambda *_, **__: Watcher())
    with outpace.LLM(tiny("llama"), device="cpu", max_model_len=32) as llm:
        llm.generate([[3, 4, 5]], outpace.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), use_tqdm=False)
    assert seen == ["step"] * 3 + ["idle"]


def test_ranks_divide_the_threads_and_are_no_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine = Machine(others=2.0)
    watcher = machine.watcher(ranks=2)
    assert steps(machine, watcher, 5 * LOOK_EVERY) == 2
    watcher.idle()
    assert (machine.threads, machine.looks) == (4, 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert share(3, 2) == 3, "what the user has set counts for each rank"

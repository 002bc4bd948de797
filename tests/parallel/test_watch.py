"""Who of the other ranks has ended, and why: the first cause counts, and nobody is left."""

import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outpace.ranks.leader import Interrupt
from outpace.ranks.messages import Sender
from outpace.ranks.watch import Follower, Watch
from tests.patience import PATIENCE

TALK = """
import os, socket, sys
from outpace.ranks.messages import Failed, Here, frame
sock = socket.socket(fileno=int(sys.argv[1]))
sock.sendall(frame(Here({})))
say = lambda text, second_hand=False: sock.sendall(frame(Failed("", text, second_hand)))
"""
SLEEP = "sock.recv(1)"


def follower(rank: int, does: str) -> Follower:
    """A process that says it is there, and then does this."""
    ours, theirs = socket.socketpair()
    with theirs:
        started = subprocess.Popen(
            [sys.executable, "-c", TALK + does, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    return Follower(rank, started, ours, Sender(ours))


def process(each: Follower) -> "subprocess.Popen[bytes]":
    assert each.process is not None, "it is on this machine"
    return each.process


def watch(*does: str) -> tuple[Watch, list[Follower], "queue.SimpleQueue[str]"]:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    followers = [follower(rank, each) for rank, each in enumerate(does, 1)]
    made = Watch(followers, lost.put)
    return made, followers, lost


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        (["os.kill(os.getpid(), 9)", SLEEP], "rank 1 of 3 was killed by SIGKILL; the other ranks were ended"),
        ([SLEEP, "say('ValueError: no'); os._exit(1)"], "rank 2 of 3 failed: ValueError: no; the other"),
        (
            [SLEEP, "print('out of luck'); sys.exit(3)"],
            "rank 2 of 3 ended with code 3; it last wrote: out of luck;",
        ),
        (["say('gloo', True)", "say('the cause')"], "rank 2 of 3 failed: the cause; the other"),
        (["say('gloo', True)", "say('gloo', True)"], "rank "),
    ],
)
def test_the_first_cause_is_told_and_nobody_is_left(
    does: list[str], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.ranks.watch.FIRST_HAND", PATIENCE)
    made, followers, lost = watch(*does)
    found = lost.get(timeout=PATIENCE)
    assert found.startswith(cause)
    assert made.cause == found
    assert [process(each).poll() for each in followers].count(None) == 0
    assert not made.wait(lambda: False), "whoever waits is told at once"


def test_a_rank_that_knows_of_another_alone_is_the_cause_if_no_other_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.ranks.watch.FIRST_HAND", 0.0)
    _, _, lost = watch("say('gloo', True)", SLEEP)
    assert lost.get(timeout=PATIENCE).startswith("rank 1 of 3 failed: gloo; the other")


def test_an_end_that_was_asked_for_is_no_loss() -> None:
    made, followers, lost = watch(SLEEP, SLEEP)
    assert made.wait(lambda: all(each.here is not None for each in followers), PATIENCE)
    made.closing = True
    for each in followers:
        each.socket.shutdown(socket.SHUT_WR)
    made.thread.join(PATIENCE)
    assert not made.thread.is_alive()
    assert made.cause is None
    assert lost.empty()
    assert [process(each).returncode for each in followers] == [0, 0]


def test_a_process_that_has_ended_is_seen_though_a_child_of_it_has_its_socket() -> None:
    made, followers, lost = watch("os.fork() or sock.recv(1); os._exit(4)")
    assert made.wait(lambda: followers[0].here is not None, PATIENCE)
    assert lost.get(timeout=PATIENCE).startswith("rank 1 of 2 ended with code 4")
    with pytest.raises(ChildProcessError):
        os.waitpid(process(followers[0]).pid, os.WNOHANG)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As in a terminal: whoever starts tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_end_of_a_step_unless_it_comes_twice(ctrl_c: None) -> None:
    held = Interrupt()
    with held:
        signal.raise_signal(signal.SIGINT)
    assert held.came
    with Interrupt():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

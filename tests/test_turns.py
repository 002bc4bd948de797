"""Turns: nobody starves while another thread takes the lock again and again."""

import threading
from collections import Counter

from outpace.turns import Turns


def test_one_thread_at_a_time_and_everybody_in_turn() -> None:
    turns, taken, inside = Turns(), list[int](), 0
    begin = threading.Barrier(5)

    def work(number: int) -> None:
        nonlocal inside
        begin.wait()
        for _ in range(50):
            with turns:
                inside += 1
                assert inside == 1
                taken.append(number)
                inside -= 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(taken) == dict.fromkeys(range(5), 50)
    with turns:
        pass


def test_a_thread_that_asks_while_another_goes_round_is_next() -> None:
    turns, done, rounds = Turns(), threading.Event(), 0
    waiting = threading.Event()

    def other() -> None:
        waiting.set()
        with turns:
            done.set()

    thread = threading.Thread(target=other)
    with turns:
        thread.start()
        waiting.wait()
    while not done.is_set():  # with threading.Lock this goes round thousands of times
        with turns:
            rounds += 1
    thread.join()
    assert rounds < 500


def test_an_error_inside_gives_the_turn_back() -> None:
    turns = Turns()
    for _ in range(2):
        try:
            with turns:
                raise ValueError
        except ValueError:
            pass

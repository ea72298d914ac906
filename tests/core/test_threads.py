"""Threads are joined when they end, but not in a garbage collection, which may run where this thread holds a lock."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from footplate.core.threads import collecting, join_however_long, shut_down


class Blocked:
    """A thread and a pool that are busy until `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.thread = threading.Thread(target=self.go.wait)
        self.thread.start()
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(self.go.wait)

    def end(self) -> None:
        self.go.set()
        self.thread.join()
        self.pool.shutdown()


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    made = Blocked()
    yield made
    made.end()


def left_unfinished(at_the_end: Callable[[], Any]) -> None:
    """Leave an iterator unfinished, in a cycle that only a garbage collection finds."""

    def numbers() -> Iterator[int]:
        try:
            yield 0
        finally:
            at_the_end()

    iterator = numbers()
    next(iterator)
    cycle: list[Any] = [iterator]
    cycle.append(cycle)


def test_an_iterator_that_is_collected_waits_for_no_thread(blocked: Blocked) -> None:
    seen: list[bool] = []

    def at_the_end() -> None:
        seen.append(collecting())
        join_however_long(blocked.thread, "it is blocked")
        shut_down(blocked.pool)

    left_unfinished(at_the_end)
    gc.collect()
    assert seen == [True]
    assert blocked.thread.is_alive()
    assert not collecting()


def test_outside_of_a_collection_they_are_waited_for(blocked: Blocked) -> None:
    threading.Timer(0.2, blocked.go.set).start()
    began = time.monotonic()
    shut_down(blocked.pool)
    join_however_long(blocked.thread, "it is blocked")
    assert time.monotonic() - began > 0.1
    assert not blocked.thread.is_alive()


def test_another_thread_waits_as_ever_while_one_collects(blocked: Blocked) -> None:
    answers: list[bool] = []

    def at_the_end() -> None:
        other = threading.Thread(target=lambda: answers.append(collecting()))
        other.start()
        other.join()

    left_unfinished(at_the_end)
    gc.collect()
    assert answers == [False]

"""Permanent threads, one for each device."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from footplate.distributed.device_threads import Threads

CPU = torch.device("cpu")


@pytest.fixture
def threads():
    kept = Threads([CPU, CPU])
    yield kept
    kept.end()


def test_tasks_run_at_the_same_time_each_in_its_own_thread(threads):
    both = threading.Barrier(2, timeout=60)

    def task() -> int:
        both.wait()
        return threading.get_ident()

    for _ in range(3):
        assert threads.run({0: task, 1: task}) == dict(enumerate(threads.idents))


def test_the_first_exception_is_raised_when_all_tasks_have_ended(threads):
    failed, ended = threading.Event(), threading.Event()

    def fails() -> None:
        failed.set()
        raise KeyError("gone")

    def lasts() -> None:
        failed.wait(10)
        ended.set()

    with pytest.raises(KeyError, match="gone") as raised:
        threads.run({0: lasts, 1: fails})
    assert ended.is_set()
    assert raised.value.__notes__ == ["Raised in replica 1 of 2, on cpu."]
    assert threads.run({1: lambda: 5}) == {1: 5}


def test_a_thread_holds_nothing_of_a_task_that_has_ended(threads):
    class Graph:
        pass

    graph = Graph()
    gone = weakref.ref(graph)
    threads.run({0: lambda graph=graph: None})
    threads.run({0: lambda: None})
    del graph
    assert gone() is None


def test_on_the_cpu_the_threads_share_the_cores_and_the_caller_keeps_its_own(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        kept = Threads([CPU] * 64)
        assert kept.run({63: torch.get_num_threads}) == {63: 1}
        assert torch.get_num_threads() == 3
        kept.end()
    finally:
        torch.set_num_threads(before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]

"""Batches wait on the device before they are needed. The state stays that of the last batch that was handed out."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from footplate.data import Loader, Prefetcher, Table


def prefetching() -> bool:
    return any(thread.name == "footplate-prefetch" for thread in threading.enumerate())


def test_every_batch_arrives_moved_and_in_order() -> None:
    batches = Prefetcher([torch.tensor(number) for number in range(20)], move=lambda batch: batch.double() * 2)
    assert [batch.item() for batch in batches] == [2.0 * number for number in range(20)]
    assert len(batches) == 20
    assert not prefetching()


def test_batches_are_made_while_the_step_runs_and_waiting_is_counted() -> None:
    def slow() -> Iterator[int]:
        for number in range(5):
            time.sleep(0.05)
            yield number

    waiting = Prefetcher(slow(), move=lambda batch: batch)
    assert list(waiting) == [0, 1, 2, 3, 4]
    assert waiting.wait_seconds > 0.15
    busy = Prefetcher(slow(), move=lambda batch: batch)
    for _ in busy:
        time.sleep(0.1)
    assert busy.wait_seconds < waiting.wait_seconds


def test_the_state_is_that_of_the_batch_handed_out(delta: str) -> None:
    loader = Loader(Table(delta), 10)
    batches = Prefetcher(loader, move=lambda batch: batch, ahead=4)
    iterator = iter(batches)
    next(iterator)
    until = time.monotonic() + 60
    while loader.state_dict()["batch"] <= 1 and time.monotonic() < until:
        time.sleep(0.01)
    state = batches.state_dict()
    assert state is not None
    assert state["batch"] == 1
    assert loader.state_dict()["batch"] > 1
    fresh = Loader(Table(delta), 10)
    fresh.load_state_dict(state)
    assert next(iter(fresh))["id"].tolist() == next(iterator)["id"].tolist()
    assert len(list(iterator)) == 18
    end = batches.state_dict()
    assert end is not None
    assert (end["epoch"], end["batch"]) == (1, 0)


def test_an_error_of_the_source_or_the_move_reaches_the_consumer() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        list(Prefetcher(broken(), move=lambda batch: batch))
    with pytest.raises(ZeroDivisionError):
        list(Prefetcher([1], move=lambda batch: batch // 0))


def test_the_consumer_itself_takes_the_first_batch_and_so_begins_whatever_there_is_to_begin() -> None:
    takers: list[str] = []

    def source() -> Iterator[int]:
        for number in range(4):
            takers.append(threading.current_thread().name)
            yield number

    assert list(Prefetcher(source(), move=lambda batch: batch)) == [0, 1, 2, 3]
    assert takers == ["MainThread", *["footplate-prefetch"] * 3]


def test_no_more_are_taken_from_the_source_than_are_wanted() -> None:
    source = iter(range(20))
    batches = Prefetcher(source, move=lambda batch: -batch, ahead=4)
    assert list(batches.first(7)) == [-number for number in range(7)]
    assert next(source) == 7
    assert list(batches.first(0)) == []
    assert next(source) == 8


def test_what_has_failed_is_not_kept_alive_by_having_been_raised() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise Gone

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(Gone):
            list(Prefetcher(broken(), move=lambda batch: batch))
        assert not [tracked for tracked in gc.get_objects() if type(tracked) is Gone]
    finally:
        gc.enable()


class Gone(Exception):
    pass


def test_a_garbage_collection_does_not_wait_for_the_batch_that_is_being_moved() -> None:
    go = threading.Event()

    def move(batch: int) -> int:
        if batch:
            go.wait()
        return batch

    iterator = iter(Prefetcher([0, 1, 2], move))
    assert next(iterator) == 0
    cycle = [iterator]
    cycle.append(cycle)  # type: ignore[arg-type]
    del iterator, cycle
    gc.collect()
    assert prefetching()
    go.set()


def test_its_thread_and_the_loaders_end_with_the_iterator(delta: str) -> None:
    # Threads of other tests.
    before = {*threading.enumerate()}
    iterator = iter(Prefetcher(Loader(Table(delta), 10), move=lambda batch: batch))
    next(iterator)
    assert prefetching()
    del iterator
    gc.collect()
    assert not [
        thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("footplate-")
    ]

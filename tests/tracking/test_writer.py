"""BackgroundWriter: in order, nothing twice, nothing lost, and never blocking its caller."""

import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.tracking.writer import BackgroundWriter


class Disk:
    """Accepts its input, except at the attempts that must fail."""

    def __init__(self, failures=()):
        self.failures = set(failures)
        self.attempts = 0
        self.kept = []

    def __call__(self, records):
        attempt, self.attempts = self.attempts, self.attempts + 1
        if attempt in self.failures:
            raise OSError("the disk is full")
        self.kept.extend(records)


@settings(max_examples=40, deadline=None)
@given(bursts=st.lists(st.integers(0, 5), max_size=6), failures=st.sets(st.integers(0, 4), max_size=3))
def test_records_arrive_once_and_in_order_whatever_fails(bursts, failures):
    disk = Disk(failures)
    writer = BackgroundWriter("test", disk)
    number = 0
    for burst in bursts:
        for _ in range(burst):
            writer.put(number)
            number += 1
        writer.flush(0.02)
    until = time.monotonic() + 60
    while not writer.flush(0.1) and time.monotonic() < until:  # each is an attempt at once
        pass
    assert writer.close(60)
    assert disk.kept == list(range(number))


def test_put_returns_while_the_disk_hangs():
    hangs, goes_on, kept = threading.Event(), threading.Event(), []

    def deliver(records):
        hangs.set()
        goes_on.wait()
        kept.extend(records)

    writer = BackgroundWriter("test", deliver)
    writer.put(0)
    writer.flush(0)
    assert hangs.wait(60)
    for number in range(1, 1000):
        writer.put(number)
    assert not writer.flush(0.01)
    assert kept == []
    goes_on.set()
    assert writer.close(60)
    assert kept == list(range(1000))


def test_records_are_delivered_without_anyone_asking():
    delivered = threading.Event()
    writer = BackgroundWriter("test", lambda records: delivered.set())
    writer.put("record")
    assert delivered.wait(60)
    writer.close(1)


def test_a_failure_is_reported_once_until_it_has_passed(caplog):
    disk = Disk(failures={0, 1, 2})
    writer = BackgroundWriter("metrics.csv", disk)
    writer.put("record")
    while not writer.flush(0.05):
        pass
    writer.close(1)
    assert [record.getMessage() for record in caplog.records] == [
        "metrics.csv can't be written (the disk is full). Training continues, and the write is retried."
    ]


def threads(name):
    return [thread for thread in threading.enumerate() if thread.name == f"footplate-{name}"]


def test_closing_gives_up_after_its_time_and_joins_the_thread():
    for name, failures in (("delivers", ()), ("gives-up", range(1000))):
        disk = Disk(failures=failures)
        writer = BackgroundWriter(name, disk)
        writer.put("record")
        assert writer.close(0.1 if failures else 60) == (not failures)
        assert not threads(name)
        assert disk.kept == ([] if failures else ["record"])


def test_closing_names_a_thread_that_hangs(caplog, monkeypatch):
    monkeypatch.setattr("footplate.tracking.writer.JOIN_S", 0.05)
    goes_on = threading.Event()
    writer = BackgroundWriter("hangs", lambda records: goes_on.wait())
    writer.put("record")
    assert not writer.close(0.05)
    assert "The thread footplate-hangs still runs 0.05 s after it was asked to end" in caplog.text
    goes_on.set()
    for thread in threads("hangs"):
        thread.join(60)
    assert not threads("hangs")

"""Scheduling: never more jobs than the machine holds, every job eventually, by priority and age."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.jobs.scheduling import (
    NOTHING,
    OVERTAKE_S,
    Place,
    Resources,
    Waiting,
    free,
    jobs_to_start,
    place_in_queue,
    why_too_long,
)

MACHINE = Resources(cpus=4, gpus=2, memory_gb=16)

needs = st.builds(
    Resources,
    cpus=st.floats(0, 8, allow_nan=False).map(lambda value: round(value, 1)),
    gpus=st.integers(0, 4),
    memory_gb=st.integers(0, 32).map(float),
)
queues = st.lists(
    st.builds(
        Waiting,
        name=st.uuids().map(str),
        needs=needs,
        since=st.floats(0, 5000, allow_nan=False),
        priority=st.integers(0, 1000),
    ),
    max_size=12,
    unique_by=lambda waiting: waiting.name,
)


def job(name: str, cpus: float, since: float = 0.0, priority: int = 0) -> Waiting:
    return Waiting(name, Resources(cpus=cpus), since, priority)


def names(jobs: list[Waiting]) -> list[str]:
    return [waiting.name for waiting in jobs]


@given(st.lists(needs, max_size=4), queues, st.floats(5000, 9000))
def test_never_more_begins_than_there_is_room_for(running: list[Resources], queue: list[Waiting], now: float):
    begun = jobs_to_start(MACHINE, running, queue, now)
    room = free(MACHINE, running)
    for waiting in begun:
        assert waiting.needs.capped(MACHINE).within(room) or waiting.needs == NOTHING
        room = room - waiting.needs.capped(MACHINE)
    assert len(set(names(begun))) == len(begun)


@given(queues)
def test_with_the_machine_empty_the_first_in_the_row_begins(queue: list[Waiting]):
    if queue:
        assert min(queue, key=lambda waiting: waiting.sort_key) in jobs_to_start(MACHINE, [], queue, 5000.0)


@settings(max_examples=60)
@given(queues, st.randoms(use_true_random=False))
def test_every_job_begins_some_day_though_small_and_urgent_ones_keep_coming(queue: list[Waiting], random):
    now, running, left, number = 5000.0, [], list(queue), 0
    while any(waiting in left for waiting in queue):
        left.append(Waiting(f"late-{number}", Resources(1, 0, 1), now, 1000))
        number += 1
        for waiting in jobs_to_start(MACHINE, [needs for _, needs in running], left, now):
            left.remove(waiting)
            running.append((now + random.uniform(1, 300), waiting.needs))
        now += 100
        running = [run for run in running if run[0] > now]
        assert number < 3000, "somebody starves"


def test_a_small_job_passes_a_large_one_for_a_while_and_then_waits_with_it():
    running = [Resources(cpus=3)]
    queue = [job("large", 4, since=0), job("small", 1, since=10)]
    assert names(jobs_to_start(MACHINE, running, queue, OVERTAKE_S - 1)) == ["small"]
    assert jobs_to_start(MACHINE, running, queue, OVERTAKE_S) == []
    assert names(jobs_to_start(MACHINE, [], queue, OVERTAKE_S)) == ["large"]


def test_a_point_of_priority_is_a_minute_of_waiting():
    four_cpus = Resources(cpus=4)
    early, urgent = Waiting("early", four_cpus, 0.0, 0), Waiting("urgent", four_cpus, 3600.0, 61)
    assert names(jobs_to_start(MACHINE, [], [early, urgent], 4000.0)) == ["urgent"]
    assert names(jobs_to_start(MACHINE, [], [early, Waiting("urgent", four_cpus, 3600.0, 59)], 4000.0)) == ["early"]


def test_what_the_machine_does_not_have_is_not_waited_for():
    huge = Waiting("huge", Resources(cpus=96, gpus=8, memory_gb=1000), 0.0)
    assert names(jobs_to_start(MACHINE, [], [huge], 1.0)) == ["huge"]
    assert jobs_to_start(MACHINE, [Resources(cpus=1)], [huge], 1.0) == []


def test_a_machine_that_shrank_has_no_room_until_enough_has_ended():
    small = Resources(cpus=2, gpus=0, memory_gb=4)
    assert jobs_to_start(small, [Resources(cpus=1), Resources(cpus=4)], [job("next", 1)], 1.0) == []


def test_a_job_that_runs_elsewhere_waits_for_no_room_and_for_nobody():
    running = [Resources(cpus=64)]
    queue = [job("large", 4, since=0), Waiting("elsewhere", NOTHING, since=10)]
    assert names(jobs_to_start(MACHINE, running, queue, OVERTAKE_S)) == ["elsewhere"]


def test_a_job_waits_for_as_long_as_it_says_and_without_that_for_ever():
    hour = {"scheduling": {"maxWaitTime": "3600s"}}
    assert not why_too_long(hour, since=1000.0, now=4600.0)
    assert why_too_long(hour, since=1000.0, now=4600.5) == "it has waited for 3600s, its maximum waiting time"
    assert not why_too_long({"scheduling": {"priority": 3}}, since=0.0, now=1e9)
    assert not why_too_long({}, since=0.0, now=1e9)


def test_the_place_in_the_queue_tells_what_a_job_waits_for():
    queue = [
        job("late", 1.0, since=50.0), job("first", 3.0), job("urgent", 8.0, since=50.0, priority=1), job("elsewhere", 0.0),
        Waiting("large", Resources(1.0, 2, 12.0), 100.0),
    ]  # fmt: skip
    running = [Resources(cpus=2.0, gpus=1, memory_gb=8.0)]
    places = {waiting.name: place_in_queue(MACHINE, running, queue, waiting.name) for waiting in queue}
    assert places == {
        "urgent": Place(1, 4, "4 vCPU (2 free)"),
        "first": Place(2, 4, "3 vCPU (2 free)"),
        "late": Place(3, 4, "the jobs before it"),
        "large": Place(4, 4, "2 accelerators (1 free) and 12 GB of memory (8 free)"),
        "elsewhere": None,
    }
    assert place_in_queue(MACHINE, running, queue, "no_such_job") is None
    assert place_in_queue(MACHINE, [], [job("only", 1.0)], "only") == Place(1, 1, "")


@given(st.lists(needs, max_size=4), queues)
def test_each_job_has_its_own_place(running: list[Resources], queue: list[Waiting]):
    places = [place_in_queue(MACHINE, running, queue, waiting.name) for waiting in queue if waiting.needs != NOTHING]
    assert sorted(place.position for place in places if place) == list(range(1, len(places) + 1))
    begun = names(jobs_to_start(MACHINE, running, queue, 5000.0))
    for waiting in queue:
        place = place_in_queue(MACHINE, running, queue, waiting.name)
        # The first job starts unless it waits for something.
        if place is not None and place.position == 1:
            assert (waiting.name in begun) == (place.waits_for == "")

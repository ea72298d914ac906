"""Requests that wait for the same job share one poll of it."""

from __future__ import annotations

import asyncio
import threading

from footplate.jobs.states import State
from footplate.server.dependencies import StateLookups


def test_looks_of_the_same_age_are_one():
    lookups, made = StateLookups(), []

    def look() -> State:
        made.append(threading.current_thread())
        return State.RUNNING

    async def ask(age_s: float) -> list[State]:
        return await asyncio.gather(*(lookups.state("job", look, age_s) for _ in range(20)))

    assert asyncio.run(ask(60.0)) == [State.RUNNING] * 20
    assert len(made) == 1
    assert made[0] is not threading.main_thread()


def test_a_request_that_has_just_come_looks_for_itself():
    lookups, states = StateLookups(), iter([State.SUCCEEDED, State.QUEUED])

    async def ask() -> list[State]:
        return [await lookups.state("job", lambda: next(states), age_s=0.0) for _ in range(2)]

    assert asyncio.run(ask()) == [State.SUCCEEDED, State.QUEUED]


def test_a_request_that_is_given_up_leaves_its_look_to_the_others():
    lookups, going = StateLookups(), threading.Event()

    def look() -> State:
        going.wait(60)
        return State.RUNNING

    async def ask() -> State:
        gone = asyncio.ensure_future(lookups.state("job", look, age_s=60.0))
        stays = asyncio.ensure_future(lookups.state("job", look, age_s=60.0))
        await asyncio.sleep(0)
        gone.cancel()
        going.set()
        return await stays

    assert asyncio.run(ask()) == State.RUNNING


def test_looks_are_kept_only_as_long_as_they_are_used():
    lookups = StateLookups()

    async def ask() -> None:
        for index in range(100):
            await lookups.state(f"job_{index}", lambda: State.RUNNING, age_s=0.0)

    asyncio.run(ask())
    assert len(lookups._recent) <= 1

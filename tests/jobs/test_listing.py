"""Filters and sort orders of lists, in gcloud's syntax."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import ConfigError
from footplate.jobs.listing import KEYS, ordered, passes
from footplate.jobs.states import State
from footplate.jobs.store.jobs import Summary

DAY = datetime(2026, 1, 31).timestamp()


def job(name: str = "flowers_1", state: State = State.RUNNING, **changes: object) -> Summary:
    given = {"created": DAY, "started": None, "ended": None, "priority": 5, "attempt": 1, "labels": {}, **changes}
    labels = json.dumps(given.pop("labels"))
    return Summary(name, state, host="here", backend="local", cause="", labels=labels, **given)  # pyright: ignore


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, True),
        ("", True),
        ("state=RUNNING", True),
        ("state=running", True),
        ("state!=RUNNING", False),
        ("state:RUN*", True),
        ("jobId:flowers_*", True),
        ("jobId:trees*", False),
        ("name=flowers_1", True),
        ("jobId = flowers_1 AND priority>=5", True),
        ("priority>5", False),
        ("attempt<2", True),
        ("createTime>2026-01-30", True),
        ("createTime>=2026-01-31T00:00", True),
        ("createTime<2026-01-31", False),
        ("startTime>2020-01-01", False),  # it hasn't started
        ("labels.team=vision", True),
        ('labels.team="vision" AND state="RUNNING"', True),
        ("labels.team!=speech", True),
        ("labels.team:VIS*", True),
        ("labels.stage=test", False),
        ("labels.stage:*", True),
        ("labels.cost-centre=42", True),
    ],
)
def test_a_filter_is_what_it_says(text: str | None, wanted: bool):
    assert passes(text)(job(labels={"team": "vision", "cost-centre": "42"})) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUNNING", "expected KEY=VALUE"),
        ("status=RUNNING", 'Did you mean "state"'),
        ("state=RUNING", 'Did you mean "RUNNING"'),
        ("state>RUNNING", "state has no order"),
        ("createTime>yesterday", "expected a time such as"),
        ("priority=high", "expected a number"),
        ("createTime:2026*", "createTime isn't text; compare it by"),
        ("labels.team=vision OR state=RUNNING", "several with AND between them"),
    ],
)
def test_what_is_no_filter_is_answered_with_what_was_expected(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        passes(text)


@given(
    st.text(max_size=30) | st.builds("{}{}{}".format, st.sampled_from(sorted(KEYS)), st.sampled_from("<>=:"), st.text())
)
def test_any_text_is_a_filter_or_one_mistake(text: str):
    with contextlib.suppress(ConfigError):
        assert passes(text)(job()) in (True, False)


jobs = st.lists(
    st.builds(
        job,
        name=st.uuids().map(str),
        state=st.sampled_from(State),
        created=st.floats(0, 9),
        started=st.none() | st.floats(0, 9),
        priority=st.integers(0, 3),
    ),
    max_size=8,
)


@given(jobs)
def test_an_order_holds_all_jobs_and_those_without_a_time_come_last(some: list[Summary]):
    for turned in (False, True):
        in_order = ordered(some, "~startTime" if turned else "startTime")
        assert sorted(in_order, key=id) == sorted(some, key=id)
        times = [summary.started for summary in in_order]
        there = [started for started in times if started is not None]
        assert times == sorted(there, reverse=turned) + [None] * (len(times) - len(there))


@given(jobs)
def test_of_several_orders_the_first_counts_most(some: list[Summary]):
    in_order = ordered(some, "priority,~createTime")
    assert in_order == sorted(some, key=lambda summary: (summary.priority, -summary.created))
    assert ordered(some, None) == some


def test_an_order_by_what_jobs_do_not_have_is_refused():
    with pytest.raises(ConfigError, match='Did you mean "createTime"'):
        ordered([job()], "creatTime")

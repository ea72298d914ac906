"""Which rank lives where."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from footplate.launch.cluster import rank_assignment
from footplate.launch.cluster.agent_info import skew

HOUSEHOLDS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@given(HOUSEHOLDS)
def test_ranks_of_a_household_follow_each_other_and_each_place_has_one(households):
    places = list(rank_assignment.settle(range(len(households)), households).values())
    assert sorted(places) == list(range(len(households)))
    lived_in = [households[place] for place in places]
    assert sum(a != b for a, b in pairwise(lived_in)) == len(set(lived_in)) - 1


@given(HOUSEHOLDS, st.data())
def test_when_slots_are_given_up_the_others_stay_and_are_numbered_without_gaps(households, data):
    settled = rank_assignment.settle(range(len(households)), households)
    left = sorted(data.draw(st.sets(st.sampled_from(range(len(households))), min_size=1)))
    shares = rank_assignment.shares([settled[slot] for slot in left], households)
    assert [rank for ranks in shares for rank in ranks] == list(range(len(left)))
    for ranks in shares:
        assert len({households[settled[left[rank]]] for rank in ranks}) == 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_each_places_first_device_is_the_one_that_its_local_rank_chooses(counts):
    names = iter(range(sum(counts)))
    given_out = [",".join(str(next(names)) for _ in range(count)) for count in counts]
    together = rank_assignment.devices(given_out).split(",")
    assert together[: len(counts)] == [text.split(",")[0] for text in given_out]
    assert sorted(map(int, together)) == list(range(sum(counts)))


def test_places_without_devices_say_nothing_or_that_there_are_none():
    assert rank_assignment.environment([None, None], "X") == {}
    assert rank_assignment.environment(["", ""], "X") == {"X": ""}


def test_versions_that_differ_are_named_on_both_sides():
    assert skew({"torch": "1"}, {"torch": "2", "footplate": "0.1"}) == (
        "torch 1, here torch 2; footplate none, here footplate 0.1"
    )
    assert skew({"torch": "2"}, {"torch": "2"}) == ""

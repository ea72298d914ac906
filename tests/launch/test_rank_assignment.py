"""Ranks and slots of a cluster's allocations."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from footplate.launch.cluster import rank_assignment
from footplate.launch.cluster.agent_info import version_differences

HOST_GROUPS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@given(HOST_GROUPS)
def test_ranks_of_a_host_group_follow_each_other_and_each_allocation_has_one(host_groups):
    allocations = list(rank_assignment.assign(range(len(host_groups)), host_groups).values())
    assert sorted(allocations) == list(range(len(host_groups)))
    groups = [host_groups[allocation] for allocation in allocations]
    assert sum(a != b for a, b in pairwise(groups)) == len(set(groups)) - 1


@given(HOST_GROUPS, st.data())
def test_when_slots_are_given_up_the_others_stay_and_are_numbered_without_gaps(host_groups, data):
    assigned = rank_assignment.assign(range(len(host_groups)), host_groups)
    left = sorted(data.draw(st.sets(st.sampled_from(range(len(host_groups))), min_size=1)))
    shares = rank_assignment.ranks_by_host_group([assigned[slot] for slot in left], host_groups)
    assert [rank for ranks in shares for rank in ranks] == list(range(len(left)))
    for ranks in shares:
        assert len({host_groups[assigned[left[rank]]] for rank in ranks}) == 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_each_allocations_first_device_is_the_one_that_its_local_rank_chooses(counts):
    names = iter(range(sum(counts)))
    given_out = [",".join(str(next(names)) for _ in range(count)) for count in counts]
    merged = rank_assignment.merged_devices(given_out).split(",")
    assert merged[: len(counts)] == [text.split(",")[0] for text in given_out]
    assert sorted(map(int, merged)) == list(range(sum(counts)))


def test_allocations_without_devices_set_no_variable_or_an_empty_one():
    assert rank_assignment.device_environment([None, None], "X") == {}
    assert rank_assignment.device_environment(["", ""], "X") == {"X": ""}


def test_versions_that_differ_are_named_on_both_sides():
    assert version_differences({"torch": "1"}, {"torch": "2", "footplate": "0.1"}) == (
        "torch 1, here torch 2; footplate none, here footplate 0.1"
    )
    assert version_differences({"torch": "2"}, {"torch": "2"}) == ""

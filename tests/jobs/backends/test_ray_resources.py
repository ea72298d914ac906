"""Resources that replicas request from a cluster: a spec runs on any cluster with cores, never on other accelerators."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from footplate.jobs.backends.ray.resources import Need, bundles, holds, needs, shortages, waiting

T4 = {"CPU": 16.0, "GPU": 4.0, "accelerator_type:T4": 1.0}
PLAIN = st.lists(st.integers(1, 64), min_size=1, max_size=6)
NEEDS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 96)), min_size=1, max_size=3)


def nodes(*having: dict[str, float]) -> dict[str, dict[str, float]]:
    return {str(number): has for number, has in enumerate(having)}


@given(PLAIN, NEEDS)
def test_a_job_without_accelerators_fits_any_cluster(cores: list[int], wanted: list[tuple[int, int]]):
    there = nodes(*({"CPU": float(count)} for count in cores))
    roles = [Need("worker", count, cpus) for count, cpus in wanted]
    asked = bundles(roles, there)
    assert len(asked) == sum(count for count, _ in wanted)
    assert holds(there, asked)
    declared = [role.bundle() for role in roles for _ in range(role.count)]
    assert all(0 < mine["CPU"] <= whole["CPU"] for mine, whole in zip(asked, declared, strict=True))
    if holds(there, declared):
        assert asked == declared
        assert not list(shortages(roles, there))


def test_what_is_too_large_takes_a_part_and_says_so():
    there = nodes({"CPU": 2.0})
    roles = [Need("master", 1, 4), Need("worker", 1, 4)]
    assert bundles(roles, there) == [{"CPU": 1.0}, {"CPU": 1.0}]
    assert list(shortages(roles, there)) == [
        "The spec declares 8 CPU, and the Ray cluster has a node of 2 CPU. The job takes 2 CPU."
    ]


def test_accelerators_are_asked_for_as_declared_and_waited_for():
    role = [Need("master", 1, 16, 4, "T4")]
    whole = [{"CPU": 16, "GPU": 4, "accelerator_type:T4": 0.001}]
    assert bundles(role, nodes(T4)) == whole
    assert not list(shortages(role, nodes(T4)))
    v100 = nodes({"CPU": 2.0}, {"CPU": 16.0, "GPU": 4.0, "accelerator_type:V100": 1.0})
    assert bundles(role, v100) == whole
    (said,) = shortages(role, v100)
    assert said.startswith("No node of the Ray cluster has 4 T4 for a master of 16 CPU and 4 T4.")
    assert (
        waiting(role, v100, {})
        == "waits for a node with 4 T4; the Ray cluster has a node of 2 CPU; a node of 16 CPU, 4 V100"
    )


def test_who_waits_says_for_what():
    two = [Need("master", 1, 16, 4, "T4"), Need("worker", 1, 16, 4, "T4")]
    assert waiting(two, nodes(T4), {}).startswith(
        "waits for more nodes: it needs a master of 16 CPU and 4 T4, a worker"
    )
    assert waiting(two[:1], nodes(T4), {"CPU": 16.0, "GPU": 1.0}) == (
        "waits for resources that others use on the Ray cluster: it needs 16 CPU (16 free), 4 GPU (1 free)"
    )


def test_needs_are_those_of_the_machines_of_a_spec():
    replicas = [
        {"role": "master", "count": 1, "vcpus": 16, "accelerator": {"type": "NVIDIA_TESLA_T4", "count": 4}},
        {"role": "worker", "count": 9, "vcpus": 16},
    ]
    assert needs(replicas) == (Need("master", 1, 16, 4, "T4"), Need("worker", 9, 16))

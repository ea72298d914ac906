"""Capacity of machine types, reasons of refusals with near alternatives, regions of accelerators, and lookup of names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.catalog.lookup import find_accelerator, find_machine
from footplate.catalog.regions import accelerators_in, check_region, regions_of, zones_of
from footplate.catalog.rows import catalog
from footplate.catalog.successors import what_became
from footplate.catalog.validity import Choice, check
from footplate.core.errors import ConfigError

MACHINES = st.sampled_from(list(catalog().machines.values()))
ACCELERATORS = st.sampled_from(list(catalog().accelerators.values()))


def refusal(machine: str, accelerator: str, count: int) -> str:
    return str(check(find_machine(machine), find_accelerator(accelerator), count))


@settings(deadline=None)
@given(MACHINES, ACCELERATORS, st.integers(0, 20))
def test_valid_is_what_the_table_lists_or_the_machine_has(machine, accelerator, count):
    validity = check(machine, accelerator, count)
    listed = count in catalog().counts.get((machine.name, accelerator.name), ())
    has = (machine.accelerator, machine.accelerator_count) == (accelerator.name, count) and not machine.legacy
    assert (validity.problem is None) == (listed or has)


@settings(deadline=None)
@given(MACHINES, ACCELERATORS, st.integers(1, 20))
def test_what_is_named_as_nearest_is_valid(machine, accelerator, count):
    for choice in check(machine, accelerator, count).nearest:
        assert choice.accelerator == accelerator.name
        assert check(catalog().machines[choice.machine], accelerator, choice.count).problem is None


def test_too_few_gpus_for_a_machine():
    assert refusal("n1-standard-32", "nvidia-tesla-v100", 2) == (
        "n1-standard-32 can't take 2 V100: allowed counts are 4 and 8 (each V100 allows at most 12 vCPU and 78 GB, and "
        "n1-standard-32 has 32 vCPU and 120 GB). Nearest: n1-standard-32 with 4 V100, n1-standard-32 with 8 V100 or "
        "n1-standard-16 with 2 V100."
    )


def test_a_count_that_there_is_nowhere():
    assert refusal("n1-standard-8", "V100", 3).startswith(
        "n1-standard-8 can't take 3 V100: allowed counts are 1, 2, 4 and 8. Nearest: n1-standard-8 with 4 V100"
    )


def test_a_machine_that_is_too_large_for_any():
    assert refusal("n1-standard-64", "K80", 8).startswith(
        "n1-standard-64 can't take any K80: it has 64 vCPU and 240 GB, and even 8 of them come with at most 64 vCPU and "
        "208 GB. Nearest: n1-highcpu-64 with 8 K80"
    )


def test_built_in_accelerators_are_what_they_are():
    assert check(find_machine("a2-highgpu-2g"), find_accelerator("A100"), 2).problem is None
    assert refusal("a2-highgpu-2g", "A100", 4).startswith("a2-highgpu-2g has 2 A100 built in, and can't take 4 A100.")


def test_a_legacy_machine_takes_no_accelerator_config():
    assert "takes no acceleratorConfig" in refusal("standard_gpu", "K80", 1)


def test_a_machine_without_accelerators():
    assert refusal("e2-standard-8", "T4", 1).startswith("e2-standard-8 takes no accelerators. Nearest: n1-standard-8")
    assert "it takes K80, P4, P100, T4 and V100" in refusal("n1-standard-8", "H100", 1)


def test_what_is_gone_says_since_when_and_what_is_there_instead():
    assert what_became(Choice("n1-highcpu-16", "NVIDIA_TESLA_K80", 4)) == (
        "K80 no longer exists: Compute Engine ended its support on 2024-05-01. "
        "Today's equivalent: n1-highcpu-16 with 4 T4."
    )
    assert "2025-01-31" in str(what_became(Choice("large_model")))
    assert what_became(Choice("n1-standard-8")) is None


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("NVIDIA_TESLA_V100", "NVIDIA_TESLA_V100"),
        ("nvidia-tesla-v100", "NVIDIA_TESLA_V100"),
        ("V100", "NVIDIA_TESLA_V100"),
        ("h100", "NVIDIA_H100_80GB"),
        ("v5e", "TPU_V5_LITEPOD"),
        ("TPU v6e", "TPU_V6E"),
        ("a100-80gb", "NVIDIA_A100_80GB"),
    ],
)
def test_an_accelerator_is_found_by_any_spelling(spelling, name):
    assert find_accelerator(spelling).name == name


def test_no_two_accelerators_share_a_spelling():
    for accelerator in catalog().accelerators.values():
        assert all(
            find_accelerator(name) == accelerator
            for name in (accelerator.name, accelerator.short, accelerator.name.lower())
        )


@settings(deadline=None)
@given(st.text(max_size=300))
def test_an_unknown_name_is_one_readable_mistake(name):
    for find in (find_machine, find_accelerator):
        said = ""
        try:
            find(name)
        except ConfigError as error:
            said = str(error)
        assert len(said) < 400


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match='Did you mean "n1-standard-8"'):
        find_machine("n1-standrd-8")


def test_accelerators_are_offered_in_some_regions_only():
    assert check_region("us-central1", ["NVIDIA_TESLA_V100"]) == []
    assert check_region("us-east4", ["NVIDIA_TESLA_V100"]) == [
        "V100 is not offered in us-east4, but in asia-east1, europe-west4, us-central1, us-east1 and us-west1."
    ]


def test_accelerators_of_one_job_must_share_a_zone():
    assert check_region("us-central1", ["NVIDIA_TESLA_P100", "NVIDIA_TESLA_V100"]) == []
    (problem,) = check_region("us-east1", ["NVIDIA_TESLA_P100", "NVIDIA_TESLA_K80", "NVIDIA_TESLA_A100"])
    assert problem.startswith("no zone of us-east1 has all of this job's accelerators: P100 in us-east1-b")
    assert problem.endswith("Together they are in us-central1-c and us-west1-b.")


def test_a_zone_is_no_region():
    assert check_region("us-west1-b", []) == ["us-west1-b is a zone: give its region, us-west1."]


@settings(deadline=None)
@given(st.text(max_size=300))
def test_an_unknown_region_is_one_sentence(region):
    if region not in catalog().regions:
        (problem,) = check_region(region, [])
        assert len(problem) < 400


def test_places_agree_with_each_other():
    for name in catalog().accelerators:
        for region in regions_of(name):
            assert name in accelerators_in(region)
            assert zones_of(name, region)

"""The catalog's data: the guide's tables in full, each row with its source, and no dead reference."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from footplate.catalog import rows
from footplate.catalog.prices import price_of_replicas
from footplate.catalog.rows import catalog
from footplate.catalog.successors import today
from footplate.catalog.validity import Choice, check

GUIDE = Path(__file__).parent / "gpu_compatibility.csv"
"""The guide's table of valid counts, as it was handed to this project."""

KINDS = {
    "machines": rows.Machine,
    "accelerators": rows.Accelerator,
    "counts": rows.Counts,
    "limits": rows.Limit,
    "tiers": rows.TierReplica,
    "regions": rows.Region,
    "zones": rows.Zone,
    "successors": rows.Succession,
}


def test_the_count_table_is_the_guides_row_for_row():
    with GUIDE.open() as file:
        expected = [tuple(row.values()) for row in csv.DictReader(file)]
    ours = [row for row in rows.read("counts", rows.Counts) if row.source == "guide"]
    table = [(row.machine_type, row.accelerator_type, " ".join(map(str, row.valid_counts))) for row in ours]
    assert table == expected
    assert len(table) == 85


@pytest.mark.parametrize("name", KINDS)
def test_every_row_has_a_source_that_is_listed_and_a_year(name):
    entries = rows.read(name, KINDS[name])
    assert entries
    for row in entries:
        assert row.source
        assert all(key in catalog().sources for key in row.source.split("; ")), row
        assert 2018 <= row.as_of <= 2026, row


@pytest.mark.parametrize("name", KINDS)
def test_no_row_is_there_twice(name):
    lines = [str(row) for row in rows.read(name, KINDS[name])]
    assert len(set(lines)) == len(lines)


def test_names_lead_to_rows():
    known = catalog()
    for machine in known.machines.values():
        assert machine.accelerator is None or machine.accelerator in known.accelerators
        assert machine.compute_engine is None or not known.machines[machine.compute_engine].legacy
    for machine, accelerator in known.counts:
        assert machine in known.machines
        assert accelerator in known.accelerators
    for zone in known.zones:
        assert zone.region in known.regions
        assert zone.accelerator in known.accelerators
    for succession in known.successions.values():
        assert succession.state in ("gone", "ageing")
        assert not set(succession.successors) - set(known.accelerators)
        assert not set(succession.successors) & set(known.successions)


def test_the_count_table_follows_from_the_limits():
    """So a refusal's reason is the table's own: the vCPU and memory limits for a number of GPUs."""
    known = catalog()
    for (name, accelerator), counts in known.counts.items():
        machine = known.machines[name]
        if machine.vcpus is None:
            continue
        limits = [limit for limit in known.limits.values() if limit.accelerator == accelerator]
        fitting = [
            limit.count
            for limit in limits
            if machine.vcpus <= limit.max_vcpus and (machine.memory_gb or 0) <= limit.max_memory_gb
        ]
        assert list(counts) == fitting, (name, accelerator)


def test_the_memory_limits_of_the_guide():
    known = catalog()
    assert known.limits["NVIDIA_TESLA_K80", 8].max_memory_gb == 208
    assert known.limits["NVIDIA_TESLA_P100", 4].max_memory_gb == 208
    assert known.limits["NVIDIA_TESLA_P100", 4].max_vcpus == 64


@pytest.mark.parametrize(
    ("name", "accelerator", "count"),
    [
        ("standard_gpu", "NVIDIA_TESLA_K80", 1),
        ("complex_model_m_gpu", "NVIDIA_TESLA_K80", 4),
        ("complex_model_l_gpu", "NVIDIA_TESLA_K80", 8),
        ("standard_p100", "NVIDIA_TESLA_P100", 1),
        ("complex_model_m_p100", "NVIDIA_TESLA_P100", 4),
        ("standard_v100", "NVIDIA_TESLA_V100", 1),
        ("large_model_v100", "NVIDIA_TESLA_V100", 1),
        ("complex_model_m_v100", "NVIDIA_TESLA_V100", 4),
        ("complex_model_l_v100", "NVIDIA_TESLA_V100", 8),
    ],
)
def test_the_legacy_machine_types_have_the_guides_gpus(name, accelerator, count):
    machine = catalog().machines[name]
    assert machine.legacy
    assert (machine.accelerator, machine.accelerator_count) == (accelerator, count)


def test_a_legacy_machine_type_is_as_large_as_the_one_that_it_was():
    known = catalog()
    for machine in known.machines.values():
        if machine.compute_engine:
            home = known.machines[machine.compute_engine]
            assert (machine.vcpus, machine.memory_gb) == (home.vcpus, home.memory_gb)


def test_the_guides_regions():
    assert {region.region for region in catalog().regions.values() if region.guide} == {
        "us-west1", "us-west2", "us-central1", "us-east1", "us-east4", "europe-west1", "europe-west2", "europe-west4",
        "asia-south1", "asia-southeast1", "asia-east1", "asia-northeast1", "asia-northeast3",
    }  # fmt: skip


def test_todays_families_are_there():
    known = catalog()
    built_in = {machine.accelerator for machine in known.machines.values() if not machine.legacy}
    assert built_in >= {
        "NVIDIA_TESLA_A100", "NVIDIA_A100_80GB", "NVIDIA_H100_80GB", "NVIDIA_H200_141GB", "NVIDIA_B200", "NVIDIA_L4",
        "TPU_V4_POD", "TPU_V5_LITEPOD", "TPU_V5P", "TPU_V6E",
    }  # fmt: skip


def test_peak_rates_are_dense_and_in_the_order_of_their_precisions():
    for accelerator in catalog().accelerators.values():
        rates = [
            accelerator.fp32_tflops,
            accelerator.tf32_tflops,
            accelerator.bf16_tflops or accelerator.fp16_tflops,
            accelerator.fp8_tflops or accelerator.int8_tops,
        ]
        known = [rate for rate in rates if rate is not None]
        assert known == sorted(known), accelerator.name
        assert accelerator.memory_gb > 0
        assert accelerator.memory_gb_per_s > 100


def test_every_choice_of_old_has_an_equivalent_that_can_be_had():
    known = catalog()
    old = [Choice(machine, name, count) for (machine, name), counts in known.counts.items() for count in counts]
    old += [Choice(row.name, row.accelerator, row.accelerator_count) for row in known.machines.values()]
    for choice in old:
        if choice.machine == "cloud_tpu" and choice.accelerator is None:
            continue
        new = today(choice)
        machine = known.machines[new.machine]
        assert not machine.legacy, choice
        assert new.accelerator not in known.successions, choice
        assert (
            check(machine, known.accelerators[new.accelerator] if new.accelerator else None, new.count).problem is None
        )
        assert bool(new.accelerator) == bool(choice.accelerator)


def test_an_equivalent_keeps_the_number_of_gpus():
    assert today(Choice("n1-highcpu-16", "NVIDIA_TESLA_K80", 4)) == Choice("n1-highcpu-16", "NVIDIA_TESLA_T4", 4)
    assert today(Choice("complex_model_l_gpu", "NVIDIA_TESLA_K80", 8)) == Choice("g2-standard-96", "NVIDIA_L4", 8)
    assert today(Choice("n1-standard-8", "NVIDIA_TESLA_V100", 1)) == Choice("a2-highgpu-1g", "NVIDIA_TESLA_A100", 1)


def test_eight_cores_of_a_cloud_tpu_are_four_chips():
    assert today(Choice("cloud_tpu", "TPU_V2", 8)) == Choice("ct5lp-hightpu-4t", "TPU_V5_LITEPOD", 4)
    assert today(Choice("cloud_tpu", "TPU_V3", 8)) == Choice("ct6e-standard-4t", "TPU_V6E", 4)


def test_what_is_of_today_stays_as_it_is():
    assert today(Choice("n1-standard-8", "NVIDIA_TESLA_T4", 2)) == Choice("n1-standard-8", "NVIDIA_TESLA_T4", 2)
    assert today(Choice("a3-highgpu-8g", "NVIDIA_H100_80GB", 8)) == Choice("a3-highgpu-8g", "NVIDIA_H100_80GB", 8)


@pytest.mark.parametrize(
    ("replicas", "usd_per_hour", "machines"),
    [
        ([("n1-standard-4", 2, None)], 2 * 0.189999, "2 n1-standard-4"),
        ([("n1-standard-8", 1, ("NVIDIA_TESLA_V100", 2))], 0.379998 + 2 * 2.48, "1 n1-standard-8 with 2 V100"),
        ([("standard_p100", 1, None)], 0.379998 + 1.46, "1 standard_p100"),
        ([("cloud_tpu", 1, ("TPU_V2", 8))], 4 * 1.125, "1 cloud_tpu with 8 TPU v2"),
        (
            [("n1-standard-4", 1, None), ("n1-standard-8", 3, None)],
            0.189999 + 3 * 0.379998,
            "1 n1-standard-4 and 3 n1-standard-8",
        ),
        ([("n1-standard-4", 1, None), ("a3-highgpu-8g", 1, None)], None, "1 n1-standard-4 and 1 a3-highgpu-8g"),
        ([], None, ""),
    ],
)
def test_the_price_of_a_jobs_machines(replicas, usd_per_hour, machines):
    values = [
        {"machineType": name, "count": count, **({"accelerator": {"type": gpu[0], "count": gpu[1]}} if gpu else {})}
        for name, count, gpu in replicas
    ]
    price = price_of_replicas(values)
    assert price.usd_per_hour == (None if usd_per_hour is None else pytest.approx(usd_per_hour))
    assert price.machines == machines

"""Names of hardware, and their meaning."""

from __future__ import annotations

import pytest

from footplate.core.errors import ConfigError
from footplate.planning.targets import target_of


@pytest.mark.parametrize(
    ("name", "topology", "devices", "chips"),
    [
        ("v2-8", "v2:2x2", 8, 4),
        ("v3-32", "v3:4x4", 32, 16),
        ("v4-8", "v4:2x2x1", 4, 4),
        ("v5e-8", "v5e:2x4", 8, 8),
        ("v5litepod-16", "v5e:4x4", 16, 16),
        ("v5p-16", "v5p:2x2x2", 8, 8),
        ("v6e-1", "v6e:1x1", 1, 1),
    ],
)
def test_a_slice_is_named_by_chips_or_cores_as_its_generation_is(name, topology, devices, chips):
    target = target_of(name)
    assert (target.topology, target.devices, target.chips) == (topology, devices, chips)


def test_a_core_of_a_v3_has_half_of_its_chips_memory_and_rates():
    target = target_of("v3-8")
    assert target.memory_bytes == 16 * 2**30
    assert target.flops_per_s("bf16-mixed") == 123e12 / 2


def test_full_single_precision_is_six_products_of_bfloat16_on_a_tpu():
    target = target_of("v5e-8")
    assert target.flops_per_s("32-true") == pytest.approx(197e12 / 6)


def test_on_a_gpu_convolutions_are_in_tf32_and_products_of_matrices_are_not():
    target = target_of("H100")
    assert target.flops_per_s("32-true") == 67e12
    assert target.flops_per_s("32-true", convolutions=1.0) == pytest.approx(494.5e12)
    assert target.flops_per_s("32-true", convolutions=0.5) == pytest.approx(1e12 / (0.5 / 67 + 0.5 / 494.5))
    assert target_of("V100").flops_per_s("32-true", convolutions=1.0) == 15.7e12


def test_the_price_of_a_gpu_includes_its_machine():
    assert target_of("A100").usd_per_hour == 3.673385
    assert "n1-" in target_of("T4x2").machine


def test_a_price_that_the_catalog_lacks_stays_unknown():
    assert target_of("H100").usd_per_hour is None


def test_a_rate_that_the_catalog_lacks_stays_unknown():
    assert target_of("V100").flops_per_s("bf16-mixed") is None
    assert target_of("v4-8").wire_bytes_per_s is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e-7", "v5e-8"),
        ("v4-4", "cores, two per chip"),
        ("v3-2048", "a plan for 1024 chips is too large. Choose v3-8, "),
        ("v7-8", 'Did you mean "v'),
        ("H1000", 'Did you mean "H100"'),
        ("H100x3", "1, 2, 4, 8"),
        ("", "no hardware that a plan knows"),
    ],
)
def test_an_unknown_name_is_answered_with_those_that_there_are(name, said):
    with pytest.raises(ConfigError, match=said):
        target_of(name)


def test_gpus_are_counted_with_an_x_or_a_colon():
    assert target_of("H100:8").machine == target_of("H100x8").machine == "a3-highgpu-8g"


def test_more_gpus_than_a_machine_has_are_several_machines():
    several, one = target_of("A100x32"), target_of("A100x16")
    assert several.machine == f"2 × {one.machine}"
    assert several.usd_per_hour == 2 * one.usd_per_hour
    assert several.machine_devices == 16
    with pytest.raises(ConfigError, match="a multiple of 8 for several machines"):
        target_of("H100x12")


def test_a_part_of_a_machines_gpus_has_no_price_of_its_own():
    alone, whole = target_of("H200"), target_of("H200x8")
    assert (alone.machine, alone.usd_per_hour) == (None, None)
    assert whole.machine is not None
    assert alone.memory_bytes == whole.memory_bytes

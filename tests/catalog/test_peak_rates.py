"""Peak rates, by the names that drivers give GPUs."""

import pytest

from footplate.catalog.peak_rates import gpu_of, products_per_s, tpu_products_per_s
from footplate.catalog.rows import catalog


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("Tesla V100-PCIE-16GB", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA L40S", None),
    ],
)
def test_a_gpu_is_found_by_its_drivers_name_unless_its_board_has_another_rate(name, short):
    row = gpu_of(name)
    assert (row.short if row else None) == short


@pytest.mark.parametrize(
    ("short", "precision", "tflops"),
    [
        ("H100", "bf16-mixed", 989.5),
        ("H100", "32-true", 67),
        ("V100", "16-mixed", 125),
        ("V100", "bf16-true", None),
        ("TPU v5e", "bf16-mixed", 197),
        ("TPU v5e", "32-true", 197 / 6),
    ],
)
def test_the_rate_is_that_of_the_precision(short, precision, tflops):
    (row,) = [row for row in catalog().accelerators.values() if row.short == short]
    rate = products_per_s(row, precision)
    assert rate == (None if tflops is None else pytest.approx(tflops * 1e12))


@pytest.mark.parametrize(
    ("device_kind", "precision", "tflops"),
    [
        # A chip of the first generations is two devices.
        ("TPU v2", "bf16-mixed", 23),
        ("TPU v3", "bf16-true", 61.5),
        ("TPU v4", "bf16-mixed", 275),
        ("TPU v5 lite", "bf16-mixed", 197),
        ("TPU v5 lite", "32-true", 197 / 6),
        ("TPU v5", "bf16-mixed", 459),
        ("TPU v5p", "bf16-mixed", 459),
        ("TPU v6 lite", "bf16-mixed", 918),
        ("TPU7x", "bf16-mixed", None),
        ("cpu", "32-true", None),
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", None),
    ],
)
def test_a_tpu_is_found_by_jaxs_name_of_its_devices(device_kind, precision, tflops):
    rate = tpu_products_per_s(device_kind, precision)
    assert rate == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_tf32_speeds_convolutions_up():
    (row,) = [row for row in catalog().accelerators.values() if row.short == "A100"]
    assert products_per_s(row, "32-true", convolutions=1.0) == pytest.approx(156e12)
    assert 19.5e12 < (products_per_s(row, "32-true", convolutions=0.5) or 0) < 156e12

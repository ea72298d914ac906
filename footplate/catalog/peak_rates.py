"""Peak rates of accelerators for matrix products, from the catalog, by the names that drivers and JAX give devices."""

from __future__ import annotations

import re

from footplate.catalog.rows import Accelerator, catalog

# Boards whose rates are lower than those of the row with the same chip. A MIG slice is a part of a GPU.
_OTHER_BOARDS = re.compile(r"PCIe|NVL|MIG|GH200", re.IGNORECASE)
_ONE_RATE = {"K80", "P4", "T4", "L4", "A100"}
# JAX's names of TPUs: the catalog's name, and the devices that JAX makes of a chip.
_TPUS = {
    "TPU v2": ("TPU v2", 2),
    "TPU v3": ("TPU v3", 2),
    "TPU v4": ("TPU v4", 1),
    "TPU v5 lite": ("TPU v5e", 1),
    "TPU v5e": ("TPU v5e", 1),
    "TPU v5": ("TPU v5p", 1),
    "TPU v5p": ("TPU v5p", 1),
    "TPU v6 lite": ("TPU v6e", 1),
    "TPU v6e": ("TPU v6e", 1),
}


def products_per_s(row: Accelerator, precision: str, convolutions: float = 0.0) -> float | None:
    """Return floating-point operations per second of one accelerator, dense; None if the catalog has no rate.

    A TPU multiplies bfloat16. A product in single precision, Footplate's default, takes six of those (XLA's HIGHEST). On a
    GPU, torch by default uses TF32 for convolutions and single precision for matrix products.

    Args:
        row: the accelerator.
        precision: the precision of the training.
        convolutions: the part of convolutions in the arithmetic, from 0 to 1.
    """
    if row.kind == "tpu":
        rate = row.bf16_tflops and row.bf16_tflops / (1 if precision.startswith("bf16") else 6)
    elif precision.startswith("bf16"):
        rate = row.bf16_tflops
    elif precision.startswith("16"):
        rate = row.fp16_tflops or row.bf16_tflops
    else:
        rate = row.fp32_tflops
        if rate and row.tf32_tflops:
            rate = 1 / ((1 - convolutions) / rate + convolutions / row.tf32_tflops)
    return rate * 1e12 if rate else None


def gpu_of(name: str) -> Accelerator | None:
    """Return the row of a GPU, by the driver's name, such as "NVIDIA H100 80GB HBM3"; None for other boards.

    The rows have the rates of the fastest boards (SXM).
    """
    words = set(re.split(r"[\s\-]+", name))
    for row in catalog().accelerators.values():
        chip = row.short.partition("-")[0]
        if row.kind == "gpu" and chip in words and (chip in _ONE_RATE or not _OTHER_BOARDS.search(name)):
            return row
    return None


def tpu_products_per_s(device_kind: str, precision: str) -> float | None:
    """Return floating-point operations per second of one device of JAX; None for other devices than the catalog's TPUs.

    Args:
        device_kind: JAX's name of the device, such as "TPU v5 lite".
        precision: the precision of the training.
    """
    short, devices = _TPUS.get(device_kind, ("", 1))
    for row in catalog().accelerators.values():
        if row.short == short and (rate := products_per_s(row, precision)):
            return rate / devices
    return None

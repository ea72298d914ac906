"""The least times of a choice, and the hours and the price that follow from them."""

from __future__ import annotations

from typing import Any

import torch

from footplate.hardware import cpu_rates
from footplate.planning.choices import Choice
from footplate.planning.roofline import Roofline, roofline
from footplate.planning.subject import Subject
from footplate.planning.targets import Target


def with_times(
    subject: Subject,
    target: Target,
    *,
    fits: bool,
    convolutions: float,
    wire: float,
    batch_size: int | None = None,
    groups: int | None = None,
    kernels_s: float | None = None,
    **facts: Any,
) -> Choice:
    """Add times, hours and price to the facts of a choice. A choice that doesn't fit has none of these.

    Args:
        subject: the training.
        target: the hardware.
        fits: True if the memory suffices.
        convolutions: the part of convolutions in the arithmetic.
        wire: the bytes that a device sends.
        batch_size: the global batch size; by default that of the subject.
        groups: the groups of devices that read different rows; by default all devices do.
        kernels_s: see `Roofline`.
        facts: the other fields of `Choice`.
    """
    batch_size = batch_size or subject.batch_size
    times = Roofline(None, None, None)
    if fits:
        on_cpu = target.kind == "cpu"
        dtype = torch.bfloat16 if subject.precision.startswith("bf16") else torch.float32
        times = roofline(
            facts["flops"],
            facts["nbytes"],
            wire,
            flops_per_s=cpu_rates.flops_per_s(dtype) if on_cpu else target.flops_per_s(subject.precision, convolutions),
            bytes_per_s=cpu_rates.bytes_per_s() if on_cpu else target.bytes_per_s,
            wire_bytes_per_s=target.wire_bytes_per_s,
            kernels_s=kernels_s,
        )

    speed = batch_size / times.step_s if times.step_s else None
    hours = subject.rows * subject.epochs / speed / 3600 if speed and subject.rows else None
    usd = hours * target.usd_per_hour if hours is not None and target.usd_per_hour is not None else None

    return Choice(
        target=target,
        batch_size=batch_size,
        per_device=batch_size // (groups or target.devices),
        fits=fits,
        roofline=times,
        samples_per_second=speed,
        hours=hours,
        usd=usd,
        **facts,
    )

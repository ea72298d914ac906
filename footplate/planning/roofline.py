"""The least time of a step: the longest of computing, moving memory, and sending.

Each of the three is an amount divided by a peak rate. A real step takes longer, because rates stay below their peaks, and
the three overlap at best. The longest of them shows what would help: a faster chip, smaller or fused tensors, or a larger
batch per device.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOFS = ("compute", "memory", "interconnect")


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step at each peak rate; None if a rate is unknown."""

    compute_s: float | None
    memory_s: float | None
    interconnect_s: float | None

    @property
    def step_s(self) -> float | None:
        """The longest known time; None unless the times of computing and memory are both known."""
        if self.compute_s is None or self.memory_s is None:
            return None
        return max(self.compute_s, self.memory_s, self.interconnect_s or 0.0)

    @property
    def roof(self) -> str | None:
        """The name of the longest time: one of `ROOFS`."""
        if self.step_s is None:
            return None
        times = (self.compute_s, self.memory_s, self.interconnect_s)
        return next(name for name, seconds in zip(ROOFS, times, strict=True) if seconds == self.step_s)


def roofline(
    flops: float,
    nbytes: float,
    wire: float,
    *,
    flops_per_s: float | None,
    bytes_per_s: float | None,
    wire_bytes_per_s: float | None,
) -> Roofline:
    """Compute the roofline of a step on one device.

    Args:
        flops: floating-point operations.
        nbytes: bytes moved to and from memory.
        wire: bytes sent to other devices; 0 for a single device.
        flops_per_s: the peak rate of computing; None if unknown.
        bytes_per_s: the peak rate of the memory; None if unknown.
        wire_bytes_per_s: the peak rate of the interconnect, in one direction; None if unknown.
    """
    sending = 0.0 if not wire else _over(wire, wire_bytes_per_s)
    return Roofline(_over(flops, flops_per_s), _over(nbytes, bytes_per_s), sending)


def _over(amount: float, rate: float | None) -> float | None:
    return amount / rate if rate else None

"""The least time of a step: the longest of computing, moving memory, and sending.

Each of the three is an amount divided by a peak rate. A real step takes longer, because rates stay below their peaks, and
the three overlap at best. The longest of them shows what would help: a faster chip, smaller or fused tensors, or a larger
batch per device.

A GPU runs its kernels one after the other. Each computes or moves memory for most of its time, so the sum of their least
times is a closer bound, and so is that sum with the sending that kernels wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOFS = ("compute", "memory", "interconnect")


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step at each peak rate; None if a rate is unknown.

    Attributes:
        compute_s: all arithmetic.
        memory_s: all movement of memory.
        interconnect_s: all sending.
        kernels_s: the kernels one after the other, each at its own roof, with the sending that they wait for; None if the
            kernels are unknown.
    """

    compute_s: float | None
    memory_s: float | None
    interconnect_s: float | None
    kernels_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """The longest known time; None unless the times of computing and memory are both known."""
        if self.compute_s is None or self.memory_s is None:
            return None
        return max(self.compute_s, self.memory_s, self.interconnect_s or 0.0, self.kernels_s or 0.0)

    @property
    def roof(self) -> str | None:
        """The name of the longest of the three times: one of `ROOFS`."""
        if self.compute_s is None or self.memory_s is None:
            return None
        times = (self.compute_s, self.memory_s, self.interconnect_s or 0.0)
        return ROOFS[times.index(max(times))]


def roofline(
    flops: float,
    nbytes: float,
    wire: float,
    *,
    flops_per_s: float | None,
    bytes_per_s: float | None,
    wire_bytes_per_s: float | None,
    kernels_s: float | None = None,
) -> Roofline:
    """Compute the roofline of a step on one device.

    Args:
        flops: floating-point operations.
        nbytes: bytes moved to and from memory.
        wire: bytes sent to other devices; 0 for a single device.
        flops_per_s: the peak rate of computing; None if unknown.
        bytes_per_s: the peak rate of the memory; None if unknown.
        wire_bytes_per_s: the peak rate of the interconnect, in one direction; None if unknown.
        kernels_s: see `Roofline`.
    """
    sending = 0.0 if not wire else _over(wire, wire_bytes_per_s)
    return Roofline(_over(flops, flops_per_s), _over(nbytes, bytes_per_s), sending, kernels_s)


def _over(amount: float, rate: float | None) -> float | None:
    return amount / rate if rate else None

"""The least time that a step can take: the longest of computing, moving memory, and sending.

Each of the three is an amount divided by a peak rate. A real step takes longer, never less: rates stay below their peaks,
and the three overlap at best. Which one is the longest says what would help: a faster chip, a smaller or fused tensor, a
larger batch per device.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOFS = ("compute", "memory", "interconnect")


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step at the peak of each rate; None where a rate isn't known."""

    compute_s: float | None
    memory_s: float | None
    interconnect_s: float | None

    @property
    def step_s(self) -> float | None:
        """The longest of those that are known; None unless both computing and memory are."""
        if self.compute_s is None or self.memory_s is None:
            return None
        return max(self.compute_s, self.memory_s, self.interconnect_s or 0.0)

    @property
    def roof(self) -> str | None:
        """Which of them that is."""
        if self.step_s is None:
            return None
        seconds = (self.compute_s, self.memory_s, self.interconnect_s)
        return next(name for name, one in zip(ROOFS, seconds, strict=True) if one == self.step_s)


def roofline(
    flops: float,
    nbytes: float,
    wire: float,
    *,
    flops_per_s: float | None,
    bytes_per_s: float | None,
    wire_bytes_per_s: float | None,
) -> Roofline:
    """The roofline of a step on one device.

    Args:
        flops: floating-point operations.
        nbytes: bytes moved to and from memory.
        wire: bytes sent to other devices; 0 for one device alone.
        flops_per_s: peak rate, as the two that follow; None where it isn't known.
        bytes_per_s: of the memory.
        wire_bytes_per_s: of the interconnect, in one direction.
    """
    sending = 0.0 if not wire else _over(wire, wire_bytes_per_s)
    return Roofline(_over(flops, flops_per_s), _over(nbytes, bytes_per_s), sending)


def _over(amount: float, rate: float | None) -> float | None:
    return amount / rate if rate else None

"""Numbers that are in the making on a device that torch doesn't know.

A step may run on hardware whose values aren't torch tensors (XLA's arrays). What it logs is then kept as a `DeviceScalar`:
nobody waits for it until somebody needs the number, and all that are needed at once are read at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class DeviceScalar(ABC):
    """One number on a device."""

    @classmethod
    @abstractmethod
    def read(cls, values: Sequence[Any]) -> list[float]:
        """Host floats of several values of this class, in one transfer; waits until they are there."""

    def __float__(self) -> float:
        return self.read([self])[0]

"""Numbers that a device is still computing and that torch doesn't know.

A step may run on hardware whose values aren't torch tensors, such as XLA's arrays. The values that it logs are kept as
`DeviceScalar`s. Nothing waits for them until a report needs the numbers. Then all of them are read in one transfer.
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
        """Return the host floats of several values of this class, in one transfer. Wait until they are computed."""

    def __float__(self) -> float:
        return self.read([self])[0]

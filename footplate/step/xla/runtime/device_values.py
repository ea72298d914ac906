"""What a program returns: numbers that are read when they are needed, and outputs as torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from footplate.core.device_scalar import DeviceScalar


class OnDevice(DeviceScalar):
    """A number that a program returns, or one of those that a call of several steps returns together.

    Args:
        array: what was returned: a number, or one for each step.
        place: which step's; None for a number.
        share: how much of it is this process's.
    """

    __slots__ = ("array", "place", "share")

    def __init__(self, array: jax.Array, place: int | None = None, share: float = 1.0) -> None:
        self.array = array
        self.place = place
        self.share = share

    @classmethod
    def read(cls, values: Sequence[OnDevice]) -> list[float]:
        """See `DeviceScalar.read`: each array is read once, whatever the number of values that are in it."""
        arrays = {id(value.array): value.array for value in values}
        numbers: dict[int, Any] = dict(zip(arrays, jax.device_get(list(arrays.values())), strict=True))
        found = (
            numbers[id(value.array)] if value.place is None else numbers[id(value.array)][value.place]
            for value in values
        )
        return [
            float(np.asarray(number).reshape(())) * value.share for number, value in zip(found, values, strict=True)
        ]

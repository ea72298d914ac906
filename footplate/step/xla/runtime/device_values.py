"""Results of a program: numbers that stay on the device until they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from footplate.core.device_scalar import DeviceScalar


class OnDevice(DeviceScalar):
    """A number that a program returns, or one of the numbers that a call of several steps returns together.

    Args:
        array: the result: a number, or one number for each step.
        index: the index of the step; None for a single number.
        share: the factor by which this process counts it.
    """

    __slots__ = ("array", "index", "share")

    def __init__(self, array: jax.Array, index: int | None = None, share: float = 1.0) -> None:
        self.array = array
        self.index = index
        self.share = share

    @classmethod
    def read(cls, values: Sequence[OnDevice]) -> list[float]:
        """See `DeviceScalar.read`. Each array is read once, however many of the values are in it."""
        arrays = {id(value.array): value.array for value in values}
        numbers: dict[int, Any] = dict(zip(arrays, jax.device_get(list(arrays.values())), strict=True))
        elements = (
            numbers[id(value.array)] if value.index is None else numbers[id(value.array)][value.index]
            for value in values
        )
        return [
            float(np.asarray(number).reshape(())) * value.share for number, value in zip(elements, values, strict=True)
        ]

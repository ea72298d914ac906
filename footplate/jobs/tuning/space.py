"""The search space: parameters, and their values as positions from 0 to 1.

A search algorithm works in the unit cube, where each parameter has a position from 0 to 1. `value_at` turns a position into
a value, `position_of` a value into a position. The scale of a parameter determines how its values are spread:

    UNIT_LINEAR_SCALE, NONE   evenly
    UNIT_LOG_SCALE            evenly in their logarithms: a decade near minValue has as much room as one near maxValue
    UNIT_REVERSE_LOG_SCALE    the mirror image of that: most room is near maxValue

Each value of an INTEGER with a linear scale, of a DISCRETE and of a CATEGORICAL parameter has the same room. All functions
are pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Value = float | int | str

LOG, REVERSE_LOG = "UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE"


@dataclass(frozen=True)
class Parameter:
    """A hyperparameter to tune.

    Attributes:
        name: the program gets the value as `--NAME=VALUE`.
        type: DOUBLE, INTEGER, CATEGORICAL or DISCRETE.
        low: the smallest value of a DOUBLE or INTEGER.
        high: the largest value of a DOUBLE or INTEGER.
        values: the values of a CATEGORICAL or DISCRETE, in their order.
        scale: LOG, REVERSE_LOG, or another text for a linear scale.
    """

    name: str
    type: str
    low: float = 0.0
    high: float = 0.0
    values: tuple[Value, ...] = ()
    scale: str = ""

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Parameter:
        """Read a ParameterSpec in the API's form, which was checked."""
        kind = spec["type"]
        values = spec.get({"CATEGORICAL": "categoricalValues", "DISCRETE": "discreteValues"}.get(kind, ""), ())
        return cls(
            spec["parameterName"], kind, spec.get("minValue") or 0.0, spec.get("maxValue") or 0.0, tuple(values),
            spec.get("scaleType") or "",
        )  # fmt: skip

    @property
    def count(self) -> int | None:
        """The number of its values; None if it is continuous."""
        if self.type == "DOUBLE":
            return 1 if self.low == self.high else None
        return int(self.high) - int(self.low) + 1 if self.type == "INTEGER" else len(self.values)

    def nth(self, index: int) -> Value:
        """The value with an index, from 0 to `count` - 1."""
        if self.type == "DOUBLE":
            return self.low
        return int(self.low) + index if self.type == "INTEGER" else self.values[index]


def value_at(parameter: Parameter, position: float) -> Value:
    """The value at a position from 0 to 1.

    >>> round(value_at(Parameter("lr", "DOUBLE", 1e-4, 1.0, scale=LOG), 0.5), 9)
    0.01
    >>> value_at(Parameter("layers", "INTEGER", 1, 4), 1.0)
    4
    """
    count, scaled = parameter.count, parameter.scale in (LOG, REVERSE_LOG)
    if count is not None and not (parameter.type == "INTEGER" and scaled):
        return parameter.nth(min(int(position * count), count - 1))
    low, high = _edges(parameter)
    if parameter.scale == LOG:
        value = _on_log(position, low, high)
    elif parameter.scale == REVERSE_LOG:
        value = low + high - _on_log(1.0 - position, low, high)
    else:
        value = low + position * (high - low)
    if parameter.type == "INTEGER":
        return min(max(round(value), int(parameter.low)), int(parameter.high))
    return min(max(value, parameter.low), parameter.high)


def position_of(parameter: Parameter, value: Value) -> float:
    """The position of a value: `value_at` returns the value for it, but for rounding."""
    count, scaled = parameter.count, parameter.scale in (LOG, REVERSE_LOG)
    if count is not None and not (parameter.type == "INTEGER" and scaled):
        index = int(value) - int(parameter.low) if parameter.type == "INTEGER" else _index(parameter, value)
        return (index + 0.5) / count
    low, high = _edges(parameter)
    number = float(value)
    if parameter.scale == LOG:
        position = _position_on_log(number, low, high)
    elif parameter.scale == REVERSE_LOG:
        position = 1.0 - _position_on_log(low + high - number, low, high)
    else:
        position = (number - low) / (high - low)
    return min(max(position, 0.0), 1.0)


def to_argument(name: str, value: Value) -> str:
    """The argument with which the program gets a value. A whole number has no decimal point, whatever its type.

    >>> to_argument("lr", 0.001), to_argument("width", 16.0)
    ('--lr=0.001', '--width=16')
    """
    return f"--{name}={to_text(value)}"


def to_text(value: Value) -> str:
    """A value as the program gets it. `float` reads the same number from it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


def combinations(parameters: Sequence[Parameter]) -> int | None:
    """The number of combinations of all values; None if a parameter is continuous."""
    counts = [parameter.count for parameter in parameters]
    return None if None in counts else math.prod(count for count in counts if count is not None)


def nth_combination(parameters: Sequence[Parameter], index: int) -> dict[str, Value]:
    """The combination with an index, from 0 to `combinations` - 1. The last parameter varies first.

    >>> nth_combination([Parameter("a", "INTEGER", 1, 2), Parameter("b", "CATEGORICAL", values=("x", "y"))], 1)
    {'a': 1, 'b': 'y'}
    """
    chosen: dict[str, Value] = {}
    for parameter in reversed(parameters):
        assert parameter.count is not None
        index, nth = divmod(index, parameter.count)
        chosen[parameter.name] = parameter.nth(nth)
    return {parameter.name: chosen[parameter.name] for parameter in parameters}


def _edges(parameter: Parameter) -> tuple[float, float]:
    """The interval that is divided among the values. A whole number has the room of half a unit on both sides."""
    room = 0.5 if parameter.type == "INTEGER" else 0.0
    return parameter.low - room, parameter.high + room


def _on_log(position: float, low: float, high: float) -> float:
    return math.exp(math.log(low) + position * (math.log(high) - math.log(low)))


def _position_on_log(value: float, low: float, high: float) -> float:
    # Rounding may have led out of the interval.
    value = min(max(value, low), high)
    return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))


def _index(parameter: Parameter, value: Value) -> int:
    return parameter.values.index(value) if parameter.type != "DOUBLE" else 0

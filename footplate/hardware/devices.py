"""Parsing of `devices=` into one of three forms.

    "auto"            →  "auto"       the accelerator chooses
    4, "4", -1        →  4, 4, -1     a count; -1 means all
    [0, 2], "0,2"     →  (0, 2)       indices ("2," is the index 2)

Parsing knows no hardware. The accelerator checks that the devices exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from footplate.core.errors import ConfigError

Devices = int | str | Sequence[int]
Form = Literal["auto"] | int | tuple[int, ...]

_FORMS = '"auto", a count, or a list of indices such as [0, 2]'


def read_devices(devices: Devices, hint: str) -> Form:
    """Parse `devices` into `"auto"`, a count (at least 1, or -1), or distinct indices.

    Args:
        devices: the user's value.
        hint: the available devices and a valid value, for the end of error texts.

    Raises:
        ConfigError: `devices` has none of the three forms.
    """
    if isinstance(devices, str):
        return _read_text(devices, hint)
    if isinstance(devices, int) and not isinstance(devices, bool):
        return _count(devices, devices, hint)
    if isinstance(devices, Sequence):
        return _indices(devices, devices, hint)
    raise ConfigError(f"devices={devices!r}: expected {_FORMS}. {hint}")


def _read_text(text: str, hint: str) -> Form:
    if text.strip() == "auto":
        return "auto"
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f'devices={text!r}: expected {_FORMS}; as text "2" or "0,2". {hint}')
    return _indices(numbers, text, hint) if "," in text else _count(numbers[0], text, hint)


def _count(count: int, original: Devices, hint: str) -> int:
    if count < 1 and count != -1:
        raise ConfigError(f"devices={original!r}: expected a count of 1 or more, or -1 for all. {hint}")
    return count


def _indices(numbers: Sequence[object], original: Devices, hint: str) -> tuple[int, ...]:
    indices = tuple(number for number in numbers if isinstance(number, int) and not isinstance(number, bool))
    if not indices or len(indices) != len(numbers) or len(set(indices)) != len(indices) or min(indices) < 0:
        raise ConfigError(f"devices={original!r}: expected different whole numbers, at least one. {hint}")
    return indices

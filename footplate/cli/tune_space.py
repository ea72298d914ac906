"""Search spaces in plain words, for `footplate tune --param NAME=SPACE`.

model.width=16,32,64          these numbers
model.kind=relu,gelu          these words
model.layers=1..8             whole numbers from 1 to 8
model.dropout=0.0..0.5        numbers from 0 to 0.5
model.lr=log:1e-5..1e-1       numbers, evenly spread in their logarithms; with whole ends, whole numbers
model.momentum=reverse-log:0.5..0.999    most of them near the upper end
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any

from footplate.core.errors import ConfigError

_SCALES = {
    "": "UNIT_LINEAR_SCALE",
    "linear": "UNIT_LINEAR_SCALE",
    "log": "UNIT_LOG_SCALE",
    "reverse-log": "UNIT_REVERSE_LOG_SCALE",
}
_RANGE = re.compile(r"(?:([a-z-]+):)?(.+?)\.\.(.+)")
_WHOLE = re.compile(r"[+-]?\d+")
_EXPECTED = "expected NAME=LOW..HIGH, NAME=log:LOW..HIGH, or NAME=VALUE,VALUE,…"


def parameter_spec(text: str) -> dict[str, Any]:
    """Read a parameter. Returns its ParameterSpec, as a config.yaml has it.

    >>> parameter_spec("model.layers=1..8")["type"], parameter_spec("model.kind=relu,gelu")["categoricalValues"]
    ('INTEGER', ['relu', 'gelu'])

    Raises:
        ConfigError: the text has another form.
    """
    name, sign, space = text.partition("=")
    name = name.removeprefix("--")
    if not (name and sign and space):
        raise ConfigError(f"--param {text}: {_EXPECTED}.")
    match = _RANGE.fullmatch(space)
    if match is not None and (match[1] or "") in _SCALES and "," not in space:
        low, high = _number(match[2]), _number(match[3])
        if low is None or high is None:
            raise ConfigError(f"--param {text}: the ends of a range must be numbers; {_EXPECTED}.")
        if low > high:
            raise ConfigError(f"--param {text}: {match[3]} is less than {match[2]}.")
        scale, is_whole = match[1] or "", bool(_WHOLE.fullmatch(match[2]) and _WHOLE.fullmatch(match[3]))
        if "log" in scale and low <= 0:
            raise ConfigError(f"--param {text}: a logarithm needs numbers above 0.")
        return {
            "parameterName": name,
            "type": "INTEGER" if is_whole else "DOUBLE",
            "minValue": low,
            "maxValue": high,
            "scaleType": _SCALES[scale],
        }
    values = [value.strip() for value in space.split(",")]
    if len(values) < 2 or "" in values:
        raise ConfigError(f"--param {text}: {_EXPECTED}.")
    if len(set(values)) < len(values):
        raise ConfigError(f"--param {text}: a value is given twice. Keep one.")
    numbers = [_number(value) for value in values]
    if None in numbers:
        return {"parameterName": name, "type": "CATEGORICAL", "categoricalValues": values}
    return {
        "parameterName": name,
        "type": "DISCRETE",
        "discreteValues": sorted({number for number in numbers if number is not None}),
    }


def _number(text: str) -> float | None:
    with suppress(ValueError):
        number = float(text)
        return number if math.isfinite(number) else None
    return None

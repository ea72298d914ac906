"""Parameters in the form that loggers record: plain values, flattened on request, and without passwords."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")


def plain(value: Any) -> Any:
    """Convert a value for JSON; values that JSON has no form for become their `repr`. Credentials in URIs are removed."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return without_credentials(value if isinstance(value, str) else repr(value))


def flatten(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested parameters to one level of plain values; the names are joined with a slash.

    >>> flatten({"model": {"lr": 0.1}, "epochs": 3, "sizes": [1, 2]})
    {'model/lr': 0.1, 'epochs': 3, 'sizes': '[1, 2]'}
    """
    flat: dict[str, Any] = {}
    for name, value in hparams.items():
        if isinstance(value, Mapping) and value:
            flat.update({f"{name}/{inner}": item for inner, item in flatten(value).items()})
        else:
            value = plain(value)
            flat[str(name)] = str(value) if isinstance(value, (list, dict)) else value
    return flat


def without_credentials(text: str) -> str:
    """Remove the user and password of every URI in a text.

    >>> without_credentials("https://me:secret@tracker.example/api")
    'https://tracker.example/api'
    """
    return _CREDENTIALS.sub("", text)


def with_epoch(metrics: dict[str, float], epoch: int | None) -> dict[str, float]:
    """Copy metrics, and add the epoch if there is one."""
    return dict(metrics) if epoch is None else {**metrics, "epoch": epoch}

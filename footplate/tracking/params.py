"""Parameters as loggers record them: plain, flat where asked, and without passwords."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")


def plain(value: Any) -> Any:
    """`value` as JSON holds it; what JSON can't hold, by its `repr`. URIs lose their credentials."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return without_credentials(value if isinstance(value, str) else repr(value))


def flatten(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Nested parameters as one level of plain values; the names are joined with a slash.

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
    """`text` with the user and password of every URI in it removed.

    >>> without_credentials("https://me:secret@tracker.example/api")
    'https://tracker.example/api'
    """
    return _CREDENTIALS.sub("", text)


def with_epoch(metrics: dict[str, float], epoch: int | None) -> dict[str, float]:
    """A copy of the metrics, with the epoch among them if there is one."""
    return dict(metrics) if epoch is None else {**metrics, "epoch": epoch}

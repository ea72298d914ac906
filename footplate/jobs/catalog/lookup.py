"""Finding rows by any spelling of their name: `NVIDIA_TESLA_V100`, `nvidia-tesla-v100` and `v100` are one accelerator."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from footplate.core.errors import ConfigError
from footplate.jobs.catalog.rows import Accelerator, Machine, catalog


def find_machine(name: str) -> Machine:
    """The machine type of this name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    found = catalog().machines.get(name) or catalog().machines.get(name.lower())
    if found is None:
        hint = nearest(name, catalog().machines) or " See: footplate catalog machines"
        raise ConfigError(f'"{name[:60]}" is no machine type of the catalog.{hint}')
    return found


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of this name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    found = _spellings().get(_plain(name))
    if found is None:
        names = [spelling for one in catalog().accelerators.values() for spelling in (one.name, one.short)]
        hint = nearest(name, names) or " See: footplate catalog accelerators"
        raise ConfigError(f'"{name[:60]}" is no accelerator of the catalog.{hint}')
    return found


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """` Did you mean …?`, or nothing where nothing is near.

    >>> nearest("n1-standrd-8", ["n1-standard-8", "a2-highgpu-1g"])
    ' Did you mean "n1-standard-8"?'
    """
    upper = {one.upper(): one for one in known}
    found = [upper[one] for one in difflib.get_close_matches(name[:100].upper(), upper, n=count, cutoff=0.7)]
    quoted = [f'"{one}"' for one in found]
    return f" Did you mean {any_of(quoted)}?" if quoted else ""


def any_of(words: Iterable[object]) -> str:
    """`a, b or c`."""
    return _joined(words, "or")


def all_of(words: Iterable[object]) -> str:
    """`a, b and c`."""
    return _joined(words, "and")


def _joined(words: Iterable[object], last: str) -> str:
    texts = [str(word) for word in words]
    return f"{', '.join(texts[:-1])} {last} {texts[-1]}" if len(texts) > 1 else "".join(texts)


def _spellings() -> dict[str, Accelerator]:
    found = {}
    for one in catalog().accelerators.values():
        for name in (one.name, one.short, one.short.removeprefix("TPU "), one.compute_engine or one.name):
            found[_plain(name)] = one
    return found


def _plain(name: str) -> str:
    return name.upper().replace("_", "-").replace(" ", "-")

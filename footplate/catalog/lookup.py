"""Find rows by any spelling of their name: `NVIDIA_TESLA_V100`, `nvidia-tesla-v100` and `v100` are one accelerator."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from footplate.catalog.rows import Accelerator, Machine, catalog
from footplate.core.errors import ConfigError


def find_machine(name: str) -> Machine:
    """Find a machine type.

    Raises:
        ConfigError: there is none of this name. The message suggests the nearest name.

    Examples:
        >>> from footplate.catalog import find_machine
        >>> find_machine("n1-standard-8").vcpus
        8
    """
    machine = catalog().machines.get(name) or catalog().machines.get(name.lower())
    if machine is None:
        hint = nearest(name, catalog().machines) or " See: footplate catalog machines"
        raise ConfigError(f'"{name[:60]}" is not a machine type of the catalog.{hint}')
    return machine


def find_accelerator(name: str) -> Accelerator:
    """Find an accelerator.

    Raises:
        ConfigError: there is none of this name. The message suggests the nearest name.

    Examples:
        >>> from footplate.catalog import find_accelerator
        >>> find_accelerator("v100").name
        'NVIDIA_TESLA_V100'
    """
    accelerator = _spellings().get(_plain(name))
    if accelerator is None:
        names = [spelling for row in catalog().accelerators.values() for spelling in (row.name, row.short)]
        hint = nearest(name, names) or " See: footplate catalog accelerators"
        raise ConfigError(f'"{name[:60]}" is not an accelerator of the catalog.{hint}')
    return accelerator


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """Suggest similar names, as ` Did you mean …?`; empty if none is similar.

    >>> nearest("n1-standrd-8", ["n1-standard-8", "a2-highgpu-1g"])
    ' Did you mean "n1-standard-8"?'
    """
    upper = {word.upper(): word for word in known}
    similar = [upper[word] for word in difflib.get_close_matches(name[:100].upper(), upper, n=count, cutoff=0.7)]
    quoted = [f'"{word}"' for word in similar]
    return f" Did you mean {any_of(quoted)}?" if quoted else ""


def any_of(words: Iterable[object]) -> str:
    """Join words as `a, b or c`."""
    return _joined(words, "or")


def all_of(words: Iterable[object]) -> str:
    """Join words as `a, b and c`."""
    return _joined(words, "and")


def _joined(words: Iterable[object], last: str) -> str:
    texts = [str(word) for word in words]
    return f"{', '.join(texts[:-1])} {last} {texts[-1]}" if len(texts) > 1 else "".join(texts)


def _spellings() -> dict[str, Accelerator]:
    spellings = {}
    for row in catalog().accelerators.values():
        for name in (row.name, row.short, row.short.removeprefix("TPU "), row.compute_engine or row.name):
            spellings[_plain(name)] = row
    return spellings


def _plain(name: str) -> str:
    return name.upper().replace("_", "-").replace(" ", "-")

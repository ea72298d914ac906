"""The names of TPU slices and their meaning.

    v3-8, v4-8, v5p-8        eight cores, which are four chips
    v5e-8, v6e-8             eight chips; `v5litepod-8` is Google Cloud's name of the first

A *chip* has one or two cores. A *device* is the unit that JAX counts and that holds a copy of a model. On v2 and v3, each
core is a device. From v4 on, the cores of a chip form one device. A *host* is the machine that a program runs on; a large
slice has several hosts. The tables are `data/generations.csv` and `data/slices.csv`. Their column `source` refers to rows
of the catalog's sources.csv.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from footplate.core.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Generation:
    """A generation of TPUs.

    Attributes:
        name: such as `v5e`.
        aliases: other names of its slices: `v5litepod`.
        catalog: its chip's name in the catalog.
        counts: the unit of the number in a slice's name.
        cores_per_chip: cores per chip.
        devices_per_chip: JAX devices per chip.
        hbm_gb: memory per chip, in GB.
        unit: rows and columns of its matrix units.
        software: the software version to create a machine of this generation with.
        source: keys of the catalog's sources.
        as_of: the year of the sources.
    """

    name: str
    aliases: tuple[str, ...]
    catalog: str
    counts: Literal["cores", "chips"]
    cores_per_chip: int
    devices_per_chip: int
    hbm_gb: int
    unit: int
    software: str
    source: str
    as_of: int


@dataclass(frozen=True)
class Slice:
    """A slice: chips that work together.

    Attributes:
        generation: generation of its chips.
        count: the number in its name.
        chips: number of chips.
        topology: arrangement of the chips: `2x4`.
        hosts: number of machines that the chips are attached to.
        source: a key of the catalog's sources.
        as_of: the year of the source.
    """

    generation: Generation
    count: int
    chips: int
    topology: str
    hosts: int
    source: str
    as_of: int

    @property
    def name(self) -> str:
        """The slice's name: `v5e-8`."""
        return f"{self.generation.name}-{self.count}"

    @property
    def cores(self) -> int:
        """Number of cores."""
        return self.chips * self.generation.cores_per_chip

    @property
    def devices(self) -> int:
        """Number of JAX devices in the whole slice."""
        return self.chips * self.generation.devices_per_chip

    @property
    def devices_per_host(self) -> int:
        """Number of JAX devices on each host."""
        return self.devices // self.hosts

    def __str__(self) -> str:
        cores = f", {self.cores} cores" if self.cores != self.chips else ""
        hosts = f"{_plural(self.hosts, 'host')} with {_plural(self.devices_per_host, 'device')} each"
        return (
            f"TPU {self.generation.name}: {_plural(self.chips, 'chip')}{cores}, {self.topology}, {hosts}, "
            f"{self.generation.hbm_gb} GB per chip"
        )


@cache
def generations() -> dict[str, Generation]:
    """All generations by name, the oldest first."""
    by_name = {}
    for row in _rows("generations"):
        counts: Literal["cores", "chips"] = "cores" if row["counts"] == "cores" else "chips"
        by_name[row["generation"]] = Generation(
            name=row["generation"],
            aliases=tuple(row["aliases"].split()),
            catalog=row["catalog"],
            counts=counts,
            cores_per_chip=int(row["cores_per_chip"]),
            devices_per_chip=int(row["devices_per_chip"]),
            hbm_gb=int(row["hbm_gb"]),
            unit=int(row["unit"]),
            software=row["software"],
            source=row["source"],
            as_of=int(row["as_of"]),
        )
    return by_name


@cache
def slices() -> dict[str, Slice]:
    """All slices by name, in the order of the file."""
    rows = [
        Slice(
            generation=generations()[row["generation"]],
            count=int(row["count"]),
            chips=int(row["chips"]),
            topology=row["topology"],
            hosts=int(row["hosts"]),
            source=row["source"],
            as_of=int(row["as_of"]),
        )
        for row in _rows("slices")
    ]
    return {row.name: row for row in rows}


def generation_of(name: str) -> Generation | None:
    """Return the generation of a slice's name, even if there is no slice of that size; None for any other name."""
    parts = re.fullmatch(r"(v\d+[a-z]*)-\d+", name.strip().lower())
    if parts is None:
        return None
    return next((known for known in generations().values() if parts[1] in (known.name, *known.aliases)), None)


def slice_of(name: str) -> Slice:
    """Return the slice of a name, in any of its spellings: `v5e-16`, `V5litepod-16`.

    Raises:
        ConfigError: there is no such generation, or no slice of this size; the text lists the known ones.
    """
    generation = generation_of(name)
    if generation is None:
        raise ConfigError(
            f'"{name[:60]}" names no TPU slice. {did_you_mean(name, [f"{known}-8" for known in generations()])}'
        )
    slice_ = slices().get(f"{generation.name}-{int(name.rpartition('-')[2])}")
    if slice_ is None:
        unit = "chips" if generation.counts == "chips" else "cores, two per chip"
        raise ConfigError(
            f'"{name}": {generation.name} slices are named by their {unit}. Use one of {sizes(generation)}.'
        )
    return slice_


def sizes(generation: Generation, most_chips: int | None = None) -> str:
    """List the names of a generation's slices with up to `most_chips` chips, as text."""
    return ", ".join(
        slice_.name
        for slice_ in slices().values()
        if slice_.generation is generation and (most_chips is None or slice_.chips <= most_chips)
    )


def _rows(name: str) -> list[dict[str, str]]:
    text = (files("footplate.hardware.tpu") / "data" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"

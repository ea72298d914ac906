"""The names of TPU slices, and what they stand for.

    v3-8, v4-8, v5p-8        eight cores, which are four chips
    v5e-8, v6e-8             eight chips; `v5litepod-8` is how the Cloud writes the first

A *chip* has one or two cores. A *device* is what JAX counts and what holds a copy of a model: on v2 and v3 each core is
one, from v4 on the cores of a chip work as one. A *host* is the machine that a program runs on; a large slice has several.
The tables are `data/generations.csv` and `data/slices.csv`; `source` names rows of the catalog's sources.csv.
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
        aliases: what else its slices are called: `v5litepod`.
        catalog: its chip's name in the catalog.
        counts: what the number in a slice's name counts.
        cores_per_chip: cores of a chip.
        devices_per_chip: devices that JAX sees in a chip.
        hbm_gb: memory of a chip, in GB.
        unit: how many rows and columns its matrix units have.
        software: the software version that a machine of this generation is to be made with.
        source: keys of the catalog's sources.
        as_of: the year in which these said so.
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

    @property
    def counted_per_chip(self) -> int:
        """How many of what a slice's name counts a chip is."""
        return self.cores_per_chip if self.counts == "cores" else 1


@dataclass(frozen=True)
class Slice:
    """Some chips that work together.

    Attributes:
        generation: of its chips.
        count: the number in its name.
        chips: how many chips it has.
        topology: how they are wired: `2x4`.
        hosts: how many machines they are attached to.
        source: a key of the catalog's sources.
        as_of: the year in which it said so.
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
        """Its name: `v5e-8`."""
        return f"{self.generation.name}-{self.count}"

    @property
    def cores(self) -> int:
        """How many cores it has."""
        return self.chips * self.generation.cores_per_chip

    @property
    def devices(self) -> int:
        """How many devices JAX sees in all of it."""
        return self.chips * self.generation.devices_per_chip

    @property
    def devices_per_host(self) -> int:
        """How many of them are attached to one machine."""
        return self.devices // self.hosts

    def __str__(self) -> str:
        cores = f", {self.cores} cores" if self.cores != self.chips else ""
        hosts = f"{_plural(self.hosts, 'host')} with {_plural(self.devices_per_host, 'device')} each"
        return (
            f"TPU {self.generation.name}: {_plural(self.chips, 'chip')}{cores}, {self.topology}, {hosts}, "
            f"{self.generation.hbm_gb} GB a chip"
        )


@cache
def generations() -> dict[str, Generation]:
    """The generations, by name, the oldest first."""
    found = {}
    for row in _rows("generations"):
        counts: Literal["cores", "chips"] = "cores" if row["counts"] == "cores" else "chips"
        found[row["generation"]] = Generation(
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
    return found


@cache
def slices() -> dict[str, Slice]:
    """The slices, by name, in the order of the file."""
    found = [
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
    return {one.name: one for one in found}


def generation_of(name: str) -> Generation | None:
    """The generation of a slice's name, whether or not there is a slice of that size; None for any other name."""
    parts = re.fullmatch(r"(v\d+[a-z]*)-\d+", name.strip().lower())
    if parts is None:
        return None
    return next((one for one in generations().values() if parts[1] in (one.name, *one.aliases)), None)


def slice_of(name: str) -> Slice:
    """The slice of a name, in any of its spellings: `v5e-16`, `V5litepod-16`.

    Raises:
        ConfigError: there is no such generation, or no slice of it with so many; names those that there are.
    """
    generation = generation_of(name)
    if generation is None:
        raise ConfigError(
            f'"{name[:60]}" names no TPU slice. {did_you_mean(name, [f"{one}-8" for one in generations()])}'
        )
    found = slices().get(f"{generation.name}-{int(name.rpartition('-')[2])}")
    if found is None:
        unit = "chips" if generation.counts == "chips" else "cores, two a chip"
        raise ConfigError(
            f'"{name}": {generation.name} slices are named by their {unit}; there are {sizes(generation)}.'
        )
    return found


def sizes(generation: Generation, most_chips: int | None = None) -> str:
    """The names of a generation's slices, of up to so many chips, as a list in a sentence."""
    return ", ".join(
        one.name
        for one in slices().values()
        if one.generation is generation and (most_chips is None or one.chips <= most_chips)
    )


def _rows(name: str) -> list[dict[str, str]]:
    text = (files("footplate.hardware.tpu") / "data" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"

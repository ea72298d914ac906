"""The catalog's rows, as dataclasses, read from `data/*.csv` once.

A column is a field of the same name. An empty cell is None, spaces separate the items of a list, and `source` names rows of
sources.csv. Sizes are in the GB of the source; rates are in 10^12 operations or 10^9 bytes a second,
dense (without sparsity), for one accelerator: a GPU, or a TPU chip.
"""

from __future__ import annotations

import csv
import types
import typing
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from footplate.core.errors import ConfigError

Row = TypeVar("Row")

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Source:
    """A document that is the source of rows."""

    key: str
    document: str
    url: str


@dataclass(frozen=True)
class Machine:
    """A machine type.

    Attributes:
        name: such as `n1-standard-8`, or a legacy one such as `standard_gpu`.
        series: `n1`, `a2`, …; `legacy` for AI Platform Training's own names.
        vcpus: None for `cloud_tpu`, which isn't a virtual machine.
        memory_gb: likewise.
        accelerator: the built-in accelerator; None if there is none, or if accelerators are attached.
        accelerator_count: the number of built-in accelerators.
        compute_engine: the Compute Engine type of a legacy one, without its accelerators.
        usd_per_hour: list price in us-central1 on demand, with built-in accelerators and without attached ones.

    Examples:
        >>> from footplate.catalog import find_machine
        >>> machine = find_machine("n1-standard-8")
        >>> machine.series, machine.vcpus, machine.memory_gb
        ('n1', 8, 30.0)
    """

    name: str
    series: str
    vcpus: int | None
    memory_gb: float | None
    accelerator: str | None
    accelerator_count: int
    compute_engine: str | None
    usd_per_hour: float | None
    source: str
    as_of: int

    @property
    def legacy(self) -> bool:
        """Return True if only AI Platform Training used this name."""
        return self.series == "legacy"


@dataclass(frozen=True)
class Accelerator:
    """A kind of GPU, or of TPU chip.

    Attributes:
        name: its name in AI Platform and Vertex AI, such as `NVIDIA_TESLA_V100`.
        short: its everyday name, such as `V100`.
        kind: `gpu` or `tpu`.
        compute_engine: its name in Compute Engine and GKE, such as `nvidia-tesla-v100`.
        interconnect: the link between the accelerators of one machine or slice.
        interconnect_gb_per_s: the bandwidth of one accelerator, both directions together.
        cores: the cores of a TPU chip; AI Platform counts cores, not chips.
        usd_per_hour: list price in us-central1 on demand, without the machine; for TPUs, with the machine.

    Examples:
        >>> from footplate.catalog import find_accelerator
        >>> accelerator = find_accelerator("T4")
        >>> accelerator.kind, accelerator.memory_gb
        ('gpu', 16.0)
    """

    name: str
    short: str
    kind: str
    compute_engine: str | None
    memory_gb: float
    memory_gb_per_s: float
    fp32_tflops: float | None
    tf32_tflops: float | None
    fp16_tflops: float | None
    bf16_tflops: float | None
    fp8_tflops: float | None
    int8_tops: float | None
    interconnect: str | None
    interconnect_gb_per_s: float | None
    cores: int | None
    usd_per_hour: float | None
    source: str
    as_of: int


@dataclass(frozen=True)
class Counts:
    """The valid counts of an accelerator on a machine type, from Google's guide."""

    machine_type: str
    accelerator_type: str
    valid_counts: list[int]
    source: str
    as_of: int


@dataclass(frozen=True)
class Limit:
    """The largest machine for a count of an accelerator."""

    accelerator: str
    count: int
    max_vcpus: int
    max_memory_gb: int
    source: str
    as_of: int


@dataclass(frozen=True)
class TierReplica:
    """A role of a scale tier: a number of machines of a type, each with its accelerators."""

    tier: str
    role: str
    machine_type: str
    count: int
    accelerator: str | None
    accelerator_count: int
    source: str
    as_of: int


@dataclass(frozen=True)
class Region:
    """A region. `guide` is true if AI Platform's guide lists it for training."""

    region: str
    place: str
    guide: bool
    source: str
    as_of: int


@dataclass(frozen=True)
class Zone:
    """A zone in which an accelerator is offered."""

    accelerator: str
    zone: str
    source: str
    as_of: int

    @property
    def region(self) -> str:
        """The zone's region: `us-west1` for `us-west1-b`."""
        return self.zone.rpartition("-")[0]


@dataclass(frozen=True)
class Succession:
    """The successors of an accelerator.

    Attributes:
        accelerator: its name.
        state: `gone` if it no longer exists, `ageing` if software drops its support.
        since: an ISO date, if known.
        reason: half a sentence.
        successors: the accelerators to use instead, the best first.
    """

    accelerator: str
    state: str
    since: str | None
    reason: str
    successors: list[str]
    source: str
    as_of: int


class Catalog:
    """The catalog's rows, in the order of the files. Each file is read when it is first needed.

    Examples:
        >>> from footplate.catalog import catalog
        >>> catalog().counts["n1-standard-8", "NVIDIA_TESLA_V100"]
        (1, 2, 4, 8)
    """

    @cached_property
    def machines(self) -> dict[str, Machine]:
        """Machine types by name."""
        return {row.name: row for row in read("machines", Machine)}

    @cached_property
    def accelerators(self) -> dict[str, Accelerator]:
        """Accelerators by name."""
        return {row.name: row for row in read("accelerators", Accelerator)}

    @cached_property
    def counts(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Valid counts of an accelerator, ascending, by machine type and accelerator."""
        return {(row.machine_type, row.accelerator_type): tuple(row.valid_counts) for row in read("counts", Counts)}

    @cached_property
    def limits(self) -> dict[tuple[str, int], Limit]:
        """Limits by accelerator and count."""
        return {(row.accelerator, row.count): row for row in read("limits", Limit)}

    @cached_property
    def tiers(self) -> dict[str, list[TierReplica]]:
        """Roles of each scale tier, by the tier's name."""
        roles: dict[str, list[TierReplica]] = {}
        for row in read("tiers", TierReplica):
            roles.setdefault(row.tier, []).append(row)
        return roles

    @cached_property
    def regions(self) -> dict[str, Region]:
        """Regions by name."""
        return {row.region: row for row in read("regions", Region)}

    @cached_property
    def zones(self) -> list[Zone]:
        """The zones of all accelerators."""
        return read("zones", Zone)

    @cached_property
    def successions(self) -> dict[str, Succession]:
        """Successors of accelerators, by accelerator."""
        return {row.accelerator: row for row in read("successors", Succession)}

    @cached_property
    def sources(self) -> dict[str, Source]:
        """Sources by key."""
        return {row.key: row for row in read("sources", Source)}


@cache
def catalog() -> Catalog:
    """The catalog that comes with Footplate.

    Examples:
        >>> from footplate.catalog import catalog
        >>> catalog().machines["a3-highgpu-8g"].accelerator
        'NVIDIA_H100_80GB'
    """
    return Catalog()


def read(name: str, kind: type[Row]) -> list[Row]:
    """The rows of `data/NAME.csv`.

    Raises:
        ConfigError: the file's columns are not the fields of `kind`.
    """
    text = (DATA / f"{name}.csv").read_text(encoding="utf-8")
    hints = typing.get_type_hints(kind)
    table = csv.DictReader(text.splitlines())
    expected = [field.name for field in fields(kind)]  # pyright: ignore[reportArgumentType]
    if table.fieldnames != expected:
        raise ConfigError(f"{name}.csv: expected the columns {expected}, found {table.fieldnames}.")
    return [kind(**{column: _cell(cell, hints[column]) for column, cell in row.items()}) for row in table]


def _cell(text: str, hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        if not text:
            return None
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        return [item(part) for part in text.split()]
    return text == "yes" if hint is bool else hint(text)

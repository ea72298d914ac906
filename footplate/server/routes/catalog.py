"""The catalog: machine types, accelerators, regions, and a check of combinations."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query

from footplate.catalog.lookup import find_accelerator, find_machine
from footplate.catalog.regions import accelerators_in, check_region, regions_of
from footplate.catalog.rows import Accelerator, Machine, Region, catalog
from footplate.catalog.successors import what_became
from footplate.catalog.validity import Choice, check
from footplate.server.models import Wire, error_responses

router = APIRouter(prefix="/api/catalog", tags=["catalog"])
_Named = Query(max_length=100)


class MachineView(Wire):
    """A machine type, and the accelerators that it accepts, with their possible counts."""

    machine: Machine
    takes: dict[str, list[int]]


class AcceleratorView(Wire):
    """An accelerator, the regions that offer it, and its successors if it is withdrawn or ageing."""

    accelerator: Accelerator
    regions: list[str]
    state: str | None
    successors: list[str]


class RegionView(Wire):
    """A region, and the accelerators that it offers."""

    region: Region
    accelerators: list[str]


class ValidityView(Wire):
    """The result of a check: the problems, the nearest valid choices, and a notice about withdrawn hardware."""

    valid: bool
    problems: list[str]
    nearest: list[dict[str, Any]]
    notice: str | None


@router.get("/machines", responses=error_responses())
def machines() -> list[MachineView]:
    """List all machine types."""
    takes: dict[str, dict[str, list[int]]] = {}
    for (machine, accelerator), counts in catalog().counts.items():
        if counts:
            takes.setdefault(machine, {})[accelerator] = list(counts)
    return [MachineView(machine=machine, takes=takes.get(machine.name, {})) for machine in catalog().machines.values()]


@router.get("/accelerators", responses=error_responses())
def accelerators() -> list[AcceleratorView]:
    """List all accelerators."""
    views = []
    for row in catalog().accelerators.values():
        succession = catalog().successions.get(row.name)
        views.append(
            AcceleratorView(
                accelerator=row,
                regions=regions_of(row.name),
                state=succession.state if succession else None,
                successors=list(succession.successors) if succession else [],
            )
        )
    return views


@router.get("/regions", responses=error_responses())
def regions() -> list[RegionView]:
    """List all regions."""
    return [RegionView(region=row, accelerators=accelerators_in(row.region)) for row in catalog().regions.values()]


@router.get("/check", responses=error_responses())
def fits(
    machine: Annotated[str, _Named],
    accelerator: Annotated[str | None, _Named] = None,
    count: Annotated[int, Query(ge=0, le=100_000)] = 0,
    region: Annotated[str | None, _Named] = None,
) -> ValidityView:
    """Check whether a machine type accepts this number of accelerators, and a region offers them."""
    row = find_machine(machine)
    kind = find_accelerator(accelerator) if accelerator else None
    validity = check(row, kind, count)
    choice = Choice(row.name, row.accelerator, row.accelerator_count)
    if kind is not None and row.accelerator is None:
        choice = Choice(row.name, kind.name, count)
    problems = [str(validity)] if validity.problem else []
    if region:
        problems += check_region(region, [choice.accelerator] if choice.accelerator else [])
    return ValidityView(
        valid=not problems,
        problems=problems,
        nearest=[asdict(nearest) for nearest in validity.nearest],
        notice=None if validity.problem else what_became(choice),
    )

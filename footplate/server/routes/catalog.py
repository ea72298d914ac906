"""The catalog, to be read: machine types, accelerators, regions, and what fits together."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query

from footplate.jobs.catalog.lookup import find_accelerator, find_machine
from footplate.jobs.catalog.regions import accelerators_in, check_region, regions_of
from footplate.jobs.catalog.rows import Accelerator, Machine, Region, catalog
from footplate.jobs.catalog.successors import what_became
from footplate.jobs.catalog.validity import Choice, check
from footplate.server.models import Wire
from footplate.server.routes.answers import answers

router = APIRouter(prefix="/api/catalog", tags=["catalog"])
_Named = Query(max_length=100)


class MachineView(Wire):
    """A machine type, and how many of which accelerators can be attached to it."""

    machine: Machine
    takes: dict[str, list[int]]


class AcceleratorView(Wire):
    """An accelerator, the regions that are known to offer it, and whether it is gone or ageing."""

    accelerator: Accelerator
    regions: list[str]
    state: str | None
    successors: list[str]


class RegionView(Wire):
    """A region, and what it is known to offer."""

    region: Region
    accelerators: list[str]


class Verdict(Wire):
    """Whether things fit together: all that is wrong, what is nearest, and what became of what is gone."""

    valid: bool
    problems: list[str]
    nearest: list[dict[str, Any]]
    notice: str | None


@router.get("/machines", responses=answers())
def machines() -> list[MachineView]:
    """All machine types."""
    takes: dict[str, dict[str, list[int]]] = {}
    for (machine, accelerator), counts in catalog().counts.items():
        if counts:
            takes.setdefault(machine, {})[accelerator] = list(counts)
    return [MachineView(machine=one, takes=takes.get(one.name, {})) for one in catalog().machines.values()]


@router.get("/accelerators", responses=answers())
def accelerators() -> list[AcceleratorView]:
    """All accelerators."""
    gone = catalog().successions
    return [
        AcceleratorView(
            accelerator=one,
            regions=regions_of(one.name),
            state=gone[one.name].state if one.name in gone else None,
            successors=list(gone[one.name].successors) if one.name in gone else [],
        )
        for one in catalog().accelerators.values()
    ]


@router.get("/regions", responses=answers())
def regions() -> list[RegionView]:
    """All regions."""
    return [RegionView(region=one, accelerators=accelerators_in(one.region)) for one in catalog().regions.values()]


@router.get("/check", responses=answers())
def fits(
    machine: Annotated[str, _Named],
    accelerator: Annotated[str | None, _Named] = None,
    count: Annotated[int, Query(ge=0, le=100_000)] = 0,
    region: Annotated[str | None, _Named] = None,
) -> Verdict:
    """Whether a machine type takes so many accelerators, in a region."""
    found = find_machine(machine)
    kind = find_accelerator(accelerator) if accelerator else None
    verdict = check(found, kind, count)
    choice = Choice(found.name, found.accelerator, found.accelerator_count)
    if kind is not None and found.accelerator is None:
        choice = Choice(found.name, kind.name, count)
    problems = [str(verdict)] if verdict.problem else []
    if region:
        problems += check_region(region, [choice.accelerator] if choice.accelerator else [])
    return Verdict(
        valid=not problems,
        problems=problems,
        nearest=[asdict(one) for one in verdict.nearest],
        notice=None if verdict.problem else what_became(choice),
    )

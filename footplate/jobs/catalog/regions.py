"""Regions and zones: where an accelerator is offered, and where several are offered together.

Accelerators of one job must be in one zone, so that its machines reach each other quickly. Some kinds have no zones in
the catalog, because no source at hand lists them; nothing is said about those.
"""

from __future__ import annotations

from collections.abc import Iterable

from footplate.jobs.catalog.lookup import all_of, nearest
from footplate.jobs.catalog.rows import catalog


def zones_of(accelerator: str, region: str | None = None) -> list[str]:
    """The zones in which an accelerator is offered, all or those of a region; empty when none is known."""
    return [one.zone for one in catalog().zones if one.accelerator == accelerator and region in (None, one.region)]


def regions_of(accelerator: str) -> list[str]:
    """The regions in which an accelerator is offered; empty when none is known."""
    return sorted({one.region for one in catalog().zones if one.accelerator == accelerator})


def accelerators_in(region: str) -> list[str]:
    """The accelerators that are offered in a region, in the catalog's order."""
    there = {one.accelerator for one in catalog().zones if one.region == region}
    return [name for name in catalog().accelerators if name in there]


def check_region(region: str, accelerators: Iterable[str]) -> list[str]:
    """What is wrong with a region, for a job with these accelerators: sentences, none if all is well.

    Args:
        region: such as `us-central1`.
        accelerators: names of the catalog.
    """
    if region not in catalog().regions:
        outer = region.rpartition("-")[0]
        if outer in catalog().regions:
            return [f"{region} is a zone: give its region, {outer}."]
        hint = nearest(region, catalog().regions) or " See: footplate catalog regions"
        return [f'"{region[:60]}" is no region of the catalog.{hint}']
    wanted = {name: set(zones_of(name, region)) for name in dict.fromkeys(accelerators) if zones_of(name)}
    problems = [
        f"{_short(name)} is not offered in {region}, but in {all_of(regions_of(name))}."
        for name, zones in wanted.items()
        if not zones
    ]
    if not problems and len(wanted) > 1 and not set.intersection(*wanted.values()):
        each = all_of(f"{_short(name)} in {all_of(sorted(zones))}" for name, zones in wanted.items())
        problems.append(f"no zone of {region} has all of this job's accelerators: {each}.{_together(wanted)}")
    return problems


def _together(wanted: Iterable[str]) -> str:
    """Where accelerators are offered in one zone."""
    zones = set.intersection(*(set(zones_of(name)) for name in wanted))
    return f" Together they are in {all_of(sorted(zones))}." if zones else " They are together nowhere."


def _short(name: str) -> str:
    return catalog().accelerators[name].short

"""Regions and zones: where an accelerator is offered, and where several are offered together.

The accelerators of a job must be in one zone, so that its machines reach each other quickly. Some accelerators have no
zones in the catalog, since no source lists them; they are not checked.
"""

from __future__ import annotations

from collections.abc import Iterable

from footplate.catalog.lookup import all_of, nearest
from footplate.catalog.rows import catalog


def zones_of(accelerator: str, region: str | None = None) -> list[str]:
    """The zones in which an accelerator is offered, all or those of a region; empty if none is known.

    Examples:
        >>> from footplate.catalog import zones_of
        >>> zones_of("NVIDIA_TESLA_V100", "us-west1")
        ['us-west1-a', 'us-west1-b']
    """
    return [zone.zone for zone in catalog().zones if zone.accelerator == accelerator and region in (None, zone.region)]


def regions_of(accelerator: str) -> list[str]:
    """The regions in which an accelerator is offered; empty if none is known.

    Examples:
        >>> from footplate.catalog import regions_of
        >>> "us-central1" in regions_of("NVIDIA_TESLA_V100")
        True
    """
    return sorted({zone.region for zone in catalog().zones if zone.accelerator == accelerator})


def accelerators_in(region: str) -> list[str]:
    """The accelerators that a region offers, in the catalog's order.

    Examples:
        >>> from footplate.catalog import accelerators_in
        >>> "NVIDIA_TESLA_T4" in accelerators_in("us-central1")
        True
    """
    offered = {zone.accelerator for zone in catalog().zones if zone.region == region}
    return [name for name in catalog().accelerators if name in offered]


def check_region(region: str, accelerators: Iterable[str]) -> list[str]:
    """Check a region for a job with these accelerators. Returns a sentence for each problem.

    Args:
        region: such as `us-central1`.
        accelerators: names of the catalog.

    Examples:
        >>> from footplate.catalog import check_region
        >>> check_region("us-central1", ["NVIDIA_TESLA_V100"])
        []
        >>> check_region("us-central1-a", ["NVIDIA_TESLA_V100"])
        ['us-central1-a is a zone: give its region, us-central1.']
    """
    if region not in catalog().regions:
        outer = region.rpartition("-")[0]
        if outer in catalog().regions:
            return [f"{region} is a zone: give its region, {outer}."]
        hint = nearest(region, catalog().regions) or " See: footplate catalog regions"
        return [f'"{region[:60]}" is not a region of the catalog.{hint}']
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
    """A sentence about the zones that offer all of these accelerators."""
    zones = set.intersection(*(set(zones_of(name)) for name in wanted))
    return f" Together they are in {all_of(sorted(zones))}." if zones else " No zone has all of them."


def _short(name: str) -> str:
    return catalog().accelerators[name].short

"""The catalog: machine types, the accelerators that they take, regions, and successors of machines that no longer exist.

    data/         CSV files; each row names its source (a key of sources.csv) and the year of the information
    rows.py       the rows as dataclasses, and the catalog of all rows
    lookup.py     find a row by any spelling of its name
    validity.py   check if a machine takes certain accelerators; if not, explain why, and find the nearest choice
    regions.py    regions and zones
    successors.py machines and accelerators that no longer exist, or soon won't, and their equivalents

The catalog is plain data and pure functions, and never queries a cloud. A cell is empty if no source is certain.

Importing this package imports none of these files. A name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.core.lazy_import import lazy

if TYPE_CHECKING:
    from footplate.catalog.lookup import find_accelerator as find_accelerator
    from footplate.catalog.lookup import find_machine as find_machine
    from footplate.catalog.prices import price_of_machine as price_of_machine
    from footplate.catalog.regions import accelerators_in as accelerators_in
    from footplate.catalog.regions import check_region as check_region
    from footplate.catalog.regions import regions_of as regions_of
    from footplate.catalog.regions import zones_of as zones_of
    from footplate.catalog.rows import Accelerator as Accelerator
    from footplate.catalog.rows import Catalog as Catalog
    from footplate.catalog.rows import Machine as Machine
    from footplate.catalog.rows import catalog as catalog
    from footplate.catalog.successors import today as today
    from footplate.catalog.successors import what_became as what_became
    from footplate.catalog.validity import Choice as Choice
    from footplate.catalog.validity import Validity as Validity
    from footplate.catalog.validity import check as check
    from footplate.catalog.validity import valid_choices as valid_choices

_HOMES = {
    "Accelerator": "footplate.catalog.rows",
    "Catalog": "footplate.catalog.rows",
    "Choice": "footplate.catalog.validity",
    "Machine": "footplate.catalog.rows",
    "Validity": "footplate.catalog.validity",
    "accelerators_in": "footplate.catalog.regions",
    "catalog": "footplate.catalog.rows",
    "check": "footplate.catalog.validity",
    "check_region": "footplate.catalog.regions",
    "find_accelerator": "footplate.catalog.lookup",
    "find_machine": "footplate.catalog.lookup",
    "price_of_machine": "footplate.catalog.prices",
    "regions_of": "footplate.catalog.regions",
    "today": "footplate.catalog.successors",
    "valid_choices": "footplate.catalog.validity",
    "what_became": "footplate.catalog.successors",
    "zones_of": "footplate.catalog.regions",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy(__name__, _HOMES)

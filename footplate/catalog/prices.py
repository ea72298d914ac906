"""List prices of machines with their accelerators: in us-central1, on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from footplate.catalog.rows import Machine, catalog


@dataclass(frozen=True)
class Price:
    """The price of machines together.

    Attributes:
        usd_per_hour: the price; None if the catalog doesn't know a part of it.
        machines: the machines, in words.
    """

    usd_per_hour: float | None
    machines: str


def price_of_machine(machine: Machine, accelerator: str | None = None, count: int = 0) -> float | None:
    """Return the price of an hour of a machine with attached accelerators; None if a part of it is unknown.

    A legacy machine type costs what its Compute Engine type costs, with its accelerators.

    Examples:
        >>> from footplate.catalog import find_machine, price_of_machine
        >>> round(price_of_machine(find_machine("n1-standard-8"), "NVIDIA_TESLA_T4", 2), 2)
        1.08
    """
    data = catalog()
    if machine.accelerator and not machine.legacy:
        return machine.usd_per_hour
    if machine.accelerator:
        accelerator, count = machine.accelerator, machine.accelerator_count
    row = data.accelerators.get(accelerator or "")
    if accelerator and (row is None or row.usd_per_hour is None):
        return None

    # The price of a TPU includes its machine. AI Platform counts cores, and a chip has several.
    if row is not None and row.usd_per_hour is not None and row.kind == "tpu":
        return count / (row.cores or 1 if machine.legacy else 1) * row.usd_per_hour
    home = data.machines[machine.compute_engine] if machine.compute_engine else machine
    if home.usd_per_hour is None:
        return None
    return home.usd_per_hour + (count * row.usd_per_hour if row is not None and row.usd_per_hour is not None else 0.0)


def price_of_replicas(replicas: Sequence[dict]) -> Price:
    """Return the price of a job's replicas.

    Args:
        replicas: as `ResolvedJob.to_dict` describes them.
    """
    data = catalog()
    total: float | None = 0.0
    words = []
    for replica in replicas:
        name, machines = replica["machineType"], replica["count"]
        attached = replica.get("accelerator") or {}
        machine = data.machines.get(name)
        price = machine and price_of_machine(machine, attached.get("type"), attached.get("count", 0))
        total = None if total is None or price is None else total + machines * price
        extra = ""
        if attached and machine is not None and not machine.accelerator:
            row = data.accelerators.get(attached["type"])
            extra = f" with {attached['count']} {row.short if row else attached['type']}"
        words.append(f"{machines} {name}{extra}")
    return Price(total if words else None, " and ".join(words))

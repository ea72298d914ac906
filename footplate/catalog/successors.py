"""Withdrawn and ageing accelerators and machine types, and their equivalents today.

`today` replaces a choice that is gone or ageing: it takes the accelerator's successor, as many of them, on the same machine
if they can be attached to it; otherwise on the smallest machine that has them built in and isn't smaller. A legacy machine
type becomes the Compute Engine type that it was. AI Platform counts the cores of a TPU; a chip has two.
"""

from __future__ import annotations

from footplate.catalog.rows import Accelerator, Machine, Succession, catalog
from footplate.catalog.validity import Choice

END = "AI Platform Training, and with it the legacy machine types, was shut down on 2025-01-31"


def what_became(choice: Choice) -> str | None:
    """Explain that a choice no longer exists, or soon won't, with its equivalent; None if it exists.

    Examples:
        >>> from footplate.catalog import Choice, what_became
        >>> print(what_became(Choice("n1-standard-8", "NVIDIA_TESLA_K80", 1)))
        K80 no longer exists: ...
    """
    machine = catalog().machines[choice.machine]
    succession = catalog().successions.get(choice.accelerator or "")
    if succession is None and not machine.legacy:
        return None
    return f"{_state(choice, succession)} Today's equivalent: {today(choice)}."


def today(choice: Choice) -> Choice:
    """The equivalent of a choice that exists today; the choice itself if nothing has changed.

    Examples:
        >>> from footplate.catalog import Choice, today
        >>> print(today(Choice("n1-standard-8", "NVIDIA_TESLA_K80", 1)))
        n1-standard-8 with 1 T4
    """
    machine = catalog().machines[choice.machine]
    succession = catalog().successions.get(choice.accelerator or "")
    home = catalog().machines[machine.compute_engine] if machine.compute_engine else machine
    if succession is None:
        return Choice(home.name, choice.accelerator, choice.count)
    count = _chips(choice)
    for name in succession.successors:
        if replacement := _with(catalog().accelerators[name], count, home):
            return replacement
    raise AssertionError(f"{choice}: successors.csv has no successor that fits")


def _state(choice: Choice, succession: Succession | None) -> str:
    if succession is None or (succession.state == "ageing" and catalog().machines[choice.machine].legacy):
        return f"{choice.machine} no longer exists: {END}."
    short = catalog().accelerators[succession.accelerator].short
    if succession.state == "gone":
        return f"{short} no longer exists: {succession.reason} on {succession.since}."
    return f"{short} is ageing: {succession.reason}."


def _chips(choice: Choice) -> int:
    accelerator = catalog().accelerators[choice.accelerator or ""]
    cores = accelerator.cores if catalog().machines[choice.machine].legacy and accelerator.kind == "tpu" else 1
    return choice.count // (cores or 1)


def _with(accelerator: Accelerator, count: int, home: Machine) -> Choice | None:
    """`count` of `accelerator` on `home`, or on the smallest machine that has them; None if there is none."""
    if count in catalog().counts.get((home.name, accelerator.name), ()):
        return Choice(home.name, accelerator.name, count)
    candidates = [
        row
        for row in catalog().machines.values()
        if (row.accelerator, row.accelerator_count) == (accelerator.name, count) and not row.legacy
    ]
    if not candidates:
        return None
    best = min(candidates, key=lambda row: (_smaller(row, home), row.vcpus or 0))
    return Choice(best.name, accelerator.name, count)


def _smaller(machine: Machine, home: Machine) -> int:
    """The missing vCPUs and GB of `machine` compared with `home`; 0 if it has neither fewer vCPUs nor less memory."""
    fewer_vcpus = max(0, (home.vcpus or 0) - (machine.vcpus or 0))
    return fewer_vcpus + int(max(0, (home.memory_gb or 0) - (machine.memory_gb or 0)))

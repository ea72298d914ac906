"""What became of an accelerator or a machine type, and what to take today instead.

Of a choice that is gone or ageing, `today` makes one that can be had: the accelerator's successor, as many of them, on
the same machine where they can be attached to it, else on the smallest machine that has them built in and is no smaller.
A legacy machine type becomes the Compute Engine type that it was. AI Platform counts a TPU's cores; a chip has two.
"""

from __future__ import annotations

from footplate.jobs.catalog.rows import Accelerator, Machine, Succession, catalog
from footplate.jobs.catalog.validity import Choice

END = "AI Platform Training, and with it the legacy machine types, was shut down on 2025-01-31"


def what_became(choice: Choice) -> str | None:
    """One sentence about a choice that can't or soon can't be had, with today's equivalent; None if it can."""
    machine = catalog().machines[choice.machine]
    succession = catalog().successions.get(choice.accelerator or "")
    if succession is None and not machine.legacy:
        return None
    return f"{_state(choice, succession)} Today's equivalent: {today(choice)}."


def today(choice: Choice) -> Choice:
    """The equivalent of a choice that can be had today; the choice itself where nothing has changed."""
    machine = catalog().machines[choice.machine]
    succession = catalog().successions.get(choice.accelerator or "")
    home = catalog().machines[machine.compute_engine] if machine.compute_engine else machine
    if succession is None:
        return Choice(home.name, choice.accelerator, choice.count)
    count = _chips(choice)
    for name in succession.successors:
        if found := _with(catalog().accelerators[name], count, home):
            return found
    raise AssertionError(f"{choice}: successors.csv has nothing for it")


def _state(choice: Choice, succession: Succession | None) -> str:
    if succession is None or (succession.state == "ageing" and catalog().machines[choice.machine].legacy):
        return f"{choice.machine} can no longer be had: {END}."
    short = catalog().accelerators[succession.accelerator].short
    if succession.state == "gone":
        return f"{short} can no longer be had: {succession.reason} on {succession.since}."
    return f"{short} is being left behind: {succession.reason}."


def _chips(choice: Choice) -> int:
    accelerator = catalog().accelerators[choice.accelerator or ""]
    cores = accelerator.cores if catalog().machines[choice.machine].legacy and accelerator.kind == "tpu" else 1
    return choice.count // (cores or 1)


def _with(accelerator: Accelerator, count: int, home: Machine) -> Choice | None:
    """`count` of `accelerator` on `home`, or on the smallest machine that has them; None if there is none."""
    if count in catalog().counts.get((home.name, accelerator.name), ()):
        return Choice(home.name, accelerator.name, count)
    having = [
        one
        for one in catalog().machines.values()
        if (one.accelerator, one.accelerator_count) == (accelerator.name, count) and not one.legacy
    ]
    if not having:
        return None
    best = min(having, key=lambda one: (_smaller(one, home), one.vcpus or 0))
    return Choice(best.name, accelerator.name, count)


def _smaller(one: Machine, home: Machine) -> int:
    """How much smaller: 0 when neither vCPU nor memory is less than before."""
    return max(0, (home.vcpus or 0) - (one.vcpus or 0)) + int(max(0, (home.memory_gb or 0) - (one.memory_gb or 0)))

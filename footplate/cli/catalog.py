"""`footplate catalog machines|accelerators|regions|check`: which machines a job can ask for, and what fits together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


def parser(name: str) -> ArgumentParser:
    """The parser of `catalog`, without its actions."""
    from footplate.cli.parsing import make_parser

    return make_parser(name, "Show machine types, accelerators and regions, and check what fits together.")


def add_actions(made: ArgumentParser) -> None:
    """Add `machines`, `accelerators`, `regions` and `check` to the parser."""
    from footplate.cli.formats import add_format
    from footplate.cli.parsing import make_parser

    name = "catalog"
    machines = make_parser(f"{name} machines", "List machine types: vCPU, memory, accelerators, list price.")
    machines.add_argument("--series", type=str | None, default=None, help="such as n1, a3 or legacy")
    machines.add_argument("--accelerator", type=str | None, default=None, help="those that have it or take it")
    machines.add_argument("--min-vcpus", type=int, default=0, help="with at least so many vCPU")
    machines.add_argument("--min-memory", type=float, default=0.0, help="with at least so many GB")

    accelerators = make_parser(f"{name} accelerators", "List GPUs and TPUs: memory, peak rates, list price.")
    accelerators.add_argument("--kind", type=Literal["gpu", "tpu"] | None, default=None, help="of one kind")
    accelerators.add_argument("--machine", type=str | None, default=None, help="those that it has or takes")
    accelerators.add_argument("--region", type=str | None, default=None, help="those that are offered there")
    accelerators.add_argument("--available", action="store_true", help="without those that can no longer be had")

    regions = make_parser(f"{name} regions", "List regions, and the accelerators that are offered in them.")
    regions.add_argument("--accelerator", type=str | None, default=None, help="those that offer it")

    check = make_parser(f"{name} check", "Say whether a machine takes accelerators, and whether a region offers them.")
    check.add_argument("machine", type=str, help="a machine type, such as n1-standard-8")
    check.add_argument(
        "--accelerator", type=str | None, default=None, help="such as count=2,type=nvidia-tesla-v100 for each machine"
    )
    check.add_argument("--region", type=str | None, default=None, help="such as us-central1")

    commands = made.add_subcommands(dest="action")
    for action, inner, about in (
        ("machines", machines, "machine types"),
        ("accelerators", accelerators, "GPUs and TPUs"),
        ("regions", regions, "regions, and what they offer"),
        ("check", check, "does this fit together"),
    ):
        add_format(inner)
        commands.add_subcommand(action, inner, help=about)


def run(name: str, argv: Sequence[str]) -> int:
    """List or check; returns 1 when what was checked doesn't fit together, else 0.

    Raises:
        FootplateError: a mistake in the arguments; a filter names what the catalog doesn't have.
    """
    from footplate.cli.parsing import parse

    made = parser(name)
    add_actions(made)
    given = parse(made, argv)
    actions = {"machines": _machines, "accelerators": _accelerators, "regions": _regions, "check": _check}
    return actions[given.action](given[given.action])


def _machines(given: Namespace) -> int:
    from footplate.cli.formats import grid, show_as
    from footplate.jobs.catalog.lookup import all_of, find_accelerator
    from footplate.jobs.catalog.rows import catalog

    known = catalog()
    series = list(dict.fromkeys(one.series for one in known.machines.values()))
    if given.series not in (None, *series):
        raise ConfigError(f"--series={given.series}: there are {all_of(series)}.")
    wanted = find_accelerator(given.accelerator).name if given.accelerator else None
    rows = []
    for one in known.machines.values():
        takes = {name: list(counts) for (machine, name), counts in known.counts.items() if machine == one.name}
        takes = {name: counts for name, counts in takes.items() if counts}
        if (
            (given.series in (None, one.series))
            and (wanted is None or wanted == one.accelerator or wanted in takes)
            and (one.vcpus or 0) >= given.min_vcpus
            and (one.memory_gb or 0) >= given.min_memory
        ):
            rows.append({**asdict(one), "takes": takes, "has_or_takes": _has_or_takes(one, takes)})
    columns = {
        "name": "machine type",
        "vcpus": "vCPU",
        "memory_gb": "GB",
        "has_or_takes": "accelerators",
        "usd_per_hour": "$/h",
        "as_of": "as of",
    }
    show_as(given.format, _without(rows, "has_or_takes"), lambda: grid(rows, columns, "has_or_takes"))
    return 0


def _has_or_takes(machine: Any, takes: dict[str, list[int]]) -> str:
    from footplate.jobs.catalog.rows import catalog

    short = {name: one.short for name, one in catalog().accelerators.items()}
    if machine.accelerator:
        return f"has {machine.accelerator_count} {short[machine.accelerator]}"
    return ", ".join(f"{'|'.join(map(str, counts))} {short[name]}" for name, counts in takes.items())


def _accelerators(given: Namespace) -> int:
    from footplate.cli.formats import grid, show_as
    from footplate.jobs.catalog.lookup import find_machine
    from footplate.jobs.catalog.regions import accelerators_in, check_region, regions_of
    from footplate.jobs.catalog.rows import catalog

    known = catalog()
    there = set(known.accelerators)
    if given.machine:
        machine = find_machine(given.machine)
        taken = {name for (one, name), counts in known.counts.items() if one == machine.name and counts}
        there &= {machine.accelerator} if machine.accelerator else taken
    if given.region:
        if problems := check_region(given.region, ()):
            raise ConfigError(problems[0])
        there &= set(accelerators_in(given.region))
    rows = []
    for one in known.accelerators.values():
        succession = known.successions.get(one.name)
        state = f"{succession.state}{f' since {succession.since}' if succession.since else ''}" if succession else ""
        if one.name in there and given.kind in (None, one.kind) and not (given.available and state.startswith("gone")):
            rows.append(
                {
                    **asdict(one),
                    "state": state,
                    "reason": succession.reason if succession else None,
                    "successors": succession.successors if succession else [],
                    "regions": regions_of(one.name),
                    "half": one.bf16_tflops or one.fp16_tflops,
                }
            )
    columns = {
        "name": "accelerator",
        "memory_gb": "GB",
        "memory_gb_per_s": "GB/s",
        "half": "TFLOPS",
        "usd_per_hour": "$/h",
        "state": "state",
    }
    show_as(given.format, _without(rows, "half"), lambda: grid(rows, columns, "state"))
    return 0


def _regions(given: Namespace) -> int:
    from footplate.cli.formats import grid, show_as
    from footplate.jobs.catalog.lookup import find_accelerator
    from footplate.jobs.catalog.regions import accelerators_in, zones_of
    from footplate.jobs.catalog.rows import catalog

    known = catalog()
    wanted = find_accelerator(given.accelerator).name if given.accelerator else None
    rows = []
    for one in known.regions.values():
        names = accelerators_in(one.region)
        if wanted is None or wanted in names:
            offered = {name: zones_of(name, one.region) for name in names if wanted in (None, name)}
            shown = zones_of(wanted, one.region) if wanted else [known.accelerators[name].short for name in names]
            rows.append({**asdict(one), "accelerators": offered, "shown": shown})
    columns = {
        "region": "region",
        "place": "place",
        "guide": "in the guide",
        "shown": "zones" if wanted else "accelerators",
    }
    show_as(given.format, _without(rows, "shown"), lambda: grid(rows, columns, "shown"))
    return 0


def _check(given: Namespace) -> int:
    from footplate.cli.formats import show_as
    from footplate.jobs.catalog.lookup import find_accelerator, find_machine
    from footplate.jobs.catalog.regions import check_region, zones_of
    from footplate.jobs.catalog.successors import today, what_became
    from footplate.jobs.catalog.validity import Choice, check
    from footplate.jobs.spec.flags import accelerator

    wanted = accelerator("accelerator", given.accelerator) if given.accelerator else None
    machine = find_machine(given.machine)
    kind = find_accelerator(wanted["type"]) if wanted else None
    verdict = check(machine, kind, _count(wanted["count"]) if wanted else 0)
    choice = Choice(machine.name, machine.accelerator, machine.accelerator_count)
    if kind is not None and wanted is not None and machine.accelerator is None:
        choice = Choice(machine.name, kind.name, int(wanted["count"]))
    problems = [str(verdict)] if verdict.problem else []
    if given.region:
        problems += check_region(given.region, [choice.accelerator] if choice.accelerator else [])
    notice = None if verdict.problem else what_became(choice)
    zones = zones_of(choice.accelerator, given.region) if choice.accelerator and not problems else []
    answer = {
        "machine": asdict(choice),
        "region": given.region,
        "valid": not problems,
        "problems": problems,
        "nearest": [asdict(one) for one in verdict.nearest],
        "zones": zones,
        "notice": notice,
        "today": asdict(today(choice)) if notice else None,
    }
    lines = problems or [f"{choice} is valid{f', in {_listed(zones)}' if zones else ''}."]
    show_as(given.format, answer, lambda: "\n".join([*lines, *([notice] if notice else [])]))
    return int(bool(problems))


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 6):
        raise ConfigError(f'--accelerator: "{text[:40]}" is no count: expected a whole number, such as count=2.')
    return int(text)


def _listed(zones: Sequence[str]) -> str:
    from footplate.jobs.catalog.lookup import all_of

    return all_of(zones)


def _without(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The rows without a column that is for people only."""
    return [{name: value for name, value in row.items() if name != key} for row in rows]

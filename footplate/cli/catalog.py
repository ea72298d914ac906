"""`footplate catalog machines|accelerators|regions|check`: machine types for jobs, and which combinations are valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from footplate.cli.arguments import Parser, make_parser
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace


def parser(name: str) -> Parser:
    """Make the parser of `catalog`, without its actions."""
    return make_parser(name, "Show machine types, accelerators and regions, and check which fit together.")


def add_actions(parser: Parser) -> None:
    """Add `machines`, `accelerators`, `regions` and `check` to the parser."""
    from footplate.cli.formats import add_format

    name = "catalog"
    machines = make_parser(f"{name} machines", "List machine types: vCPU, memory, accelerators, list price.")
    machines.add_argument("--series", help="only this series, such as n1, a3 or legacy")
    machines.add_argument("--accelerator", help="only machines that have this accelerator or accept it")
    machines.add_argument("--min-vcpus", type=int, default=0, help="only machines with at least this many vCPU")
    machines.add_argument("--min-memory", type=float, default=0.0, help="only machines with at least this many GB")

    accelerators = make_parser(f"{name} accelerators", "List GPUs and TPUs: memory, peak rates, list price.")
    accelerators.add_argument("--kind", choices=("gpu", "tpu"), help="only this kind")
    accelerators.add_argument("--machine", help="only accelerators that this machine has or accepts")
    accelerators.add_argument("--region", help="only accelerators that this region offers")
    accelerators.add_argument("--available", action="store_true", help="leave out accelerators that are withdrawn")

    regions = make_parser(f"{name} regions", "List regions, and the accelerators that they offer.")
    regions.add_argument("--accelerator", help="only regions that offer this accelerator")

    check = make_parser(f"{name} check", "Check whether a machine accepts accelerators, and a region offers them.")
    check.add_argument("machine", help="a machine type, such as n1-standard-8")
    check.add_argument("--accelerator", help="accelerators of each machine, such as count=2,type=nvidia-tesla-v100")
    check.add_argument("--region", help="a region, such as us-central1")

    actions = parser.add_subcommands(dest="action")
    for action, inner, about in (
        ("machines", machines, "list machine types"),
        ("accelerators", accelerators, "list GPUs and TPUs"),
        ("regions", regions, "list regions, and the accelerators that they offer"),
        ("check", check, "check whether a machine, accelerators and a region fit together"),
    ):
        add_format(inner)
        actions.add_subcommand(action, inner, help=about)


def run(name: str, argv: Sequence[str]) -> int:
    """List or check; returns 1 if the checked parts don't fit together, else 0.

    Raises:
        FootplateError: a mistake in the arguments; a filter has a value that isn't in the catalog.
    """
    catalog_parser = parser(name)
    add_actions(catalog_parser)
    args = catalog_parser.parse_args(argv)
    actions = {"machines": _machines, "accelerators": _accelerators, "regions": _regions, "check": _check}
    return actions[args.action](args)


def _machines(args: Namespace) -> int:
    from footplate.catalog.lookup import all_of, find_accelerator
    from footplate.catalog.rows import catalog
    from footplate.cli.formats import grid, show_as

    data = catalog()
    series = list(dict.fromkeys(machine.series for machine in data.machines.values()))
    if args.series not in (None, *series):
        raise ConfigError(f"--series={args.series}: there are {all_of(series)}.")
    wanted = find_accelerator(args.accelerator).name if args.accelerator else None

    rows = []
    for machine in data.machines.values():
        takes = {name: list(counts) for (owner, name), counts in data.counts.items() if owner == machine.name}
        takes = {name: counts for name, counts in takes.items() if counts}
        if (
            (args.series in (None, machine.series))
            and (wanted is None or wanted == machine.accelerator or wanted in takes)
            and (machine.vcpus or 0) >= args.min_vcpus
            and (machine.memory_gb or 0) >= args.min_memory
        ):
            rows.append({**asdict(machine), "takes": takes, "has_or_takes": _has_or_takes(machine, takes)})

    columns = {
        "name": "machine type",
        "vcpus": "vCPU",
        "memory_gb": "GB",
        "has_or_takes": "accelerators",
        "usd_per_hour": "$/h",
        "as_of": "as of",
    }
    show_as(args.format, _without(rows, "has_or_takes"), lambda: grid(rows, columns, "has_or_takes"))
    return 0


def _has_or_takes(machine: Any, takes: dict[str, list[int]]) -> str:
    from footplate.catalog.rows import catalog

    short = {name: accelerator.short for name, accelerator in catalog().accelerators.items()}
    if machine.accelerator:
        return f"has {machine.accelerator_count} {short[machine.accelerator]}"
    return ", ".join(f"{'|'.join(map(str, counts))} {short[name]}" for name, counts in takes.items())


def _accelerators(args: Namespace) -> int:
    from footplate.catalog.lookup import find_machine
    from footplate.catalog.regions import accelerators_in, check_region, regions_of
    from footplate.catalog.rows import catalog
    from footplate.cli.formats import grid, show_as

    data = catalog()
    selected = set(data.accelerators)
    if args.machine:
        machine = find_machine(args.machine)
        accepted = {name for (owner, name), counts in data.counts.items() if owner == machine.name and counts}
        selected &= {machine.accelerator} if machine.accelerator else accepted
    if args.region:
        if problems := check_region(args.region, ()):
            raise ConfigError(problems[0])
        selected &= set(accelerators_in(args.region))

    rows = []
    for row in data.accelerators.values():
        succession = data.successions.get(row.name)
        state = f"{succession.state}{f' since {succession.since}' if succession.since else ''}" if succession else ""
        gone = args.available and state.startswith("gone")
        if row.name in selected and args.kind in (None, row.kind) and not gone:
            rows.append(
                {
                    **asdict(row),
                    "state": state,
                    "reason": succession.reason if succession else None,
                    "successors": succession.successors if succession else [],
                    "regions": regions_of(row.name),
                    "half": row.bf16_tflops or row.fp16_tflops,
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
    show_as(args.format, _without(rows, "half"), lambda: grid(rows, columns, "state"))
    return 0


def _regions(args: Namespace) -> int:
    from footplate.catalog.lookup import find_accelerator
    from footplate.catalog.regions import accelerators_in, zones_of
    from footplate.catalog.rows import catalog
    from footplate.cli.formats import grid, show_as

    data = catalog()
    wanted = find_accelerator(args.accelerator).name if args.accelerator else None

    rows = []
    for row in data.regions.values():
        names = accelerators_in(row.region)
        if wanted is None or wanted in names:
            offered = {name: zones_of(name, row.region) for name in names if wanted in (None, name)}
            shown = zones_of(wanted, row.region) if wanted else [data.accelerators[name].short for name in names]
            rows.append({**asdict(row), "accelerators": offered, "shown": shown})

    columns = {
        "region": "region",
        "place": "place",
        "guide": "in the guide",
        "shown": "zones" if wanted else "accelerators",
    }
    show_as(args.format, _without(rows, "shown"), lambda: grid(rows, columns, "shown"))
    return 0


def _check(args: Namespace) -> int:
    from footplate.catalog.lookup import all_of, find_accelerator, find_machine
    from footplate.catalog.regions import check_region, zones_of
    from footplate.catalog.successors import today, what_became
    from footplate.catalog.validity import Choice, check
    from footplate.cli.formats import show_as
    from footplate.jobs.spec.flags import accelerator

    wanted = accelerator("accelerator", args.accelerator) if args.accelerator else None
    machine = find_machine(args.machine)
    kind = find_accelerator(wanted["type"]) if wanted else None
    validity = check(machine, kind, _count(wanted["count"]) if wanted else 0)

    choice = Choice(machine.name, machine.accelerator, machine.accelerator_count)
    if kind is not None and wanted is not None and machine.accelerator is None:
        choice = Choice(machine.name, kind.name, int(wanted["count"]))
    problems = [str(validity)] if validity.problem else []
    if args.region:
        problems += check_region(args.region, [choice.accelerator] if choice.accelerator else [])
    notice = None if validity.problem else what_became(choice)
    zones = zones_of(choice.accelerator, args.region) if choice.accelerator and not problems else []

    answer = {
        "machine": asdict(choice),
        "region": args.region,
        "valid": not problems,
        "problems": problems,
        "nearest": [asdict(nearest) for nearest in validity.nearest],
        "zones": zones,
        "notice": notice,
        "today": asdict(today(choice)) if notice else None,
    }
    lines = problems or [f"{choice} is valid{f', in {all_of(zones)}' if zones else ''}."]
    show_as(args.format, answer, lambda: "\n".join([*lines, *([notice] if notice else [])]))
    return int(bool(problems))


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 6):
        raise ConfigError(f'--accelerator: "{text[:40]}" is no count: expected a whole number, such as count=2.')
    return int(text)


def _without(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Remove a column that only the table for people has."""
    return [{name: value for name, value in row.items() if name != key} for row in rows]

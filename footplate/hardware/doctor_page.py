"""The terminal page of `footplate doctor`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from footplate.hardware.doctor import AcceleratorReport, Report
from footplate.hardware.machine import readable_size
from footplate.hardware.packages import Package

Row = tuple[str, Text]


def page(report: Report) -> RenderableType:
    """Build the page: machine, accelerators, the TPU if there is one, packages, problems, advice, conclusion."""
    return Group(
        _section("Machine", _machine(report)),
        _section(
            "Accelerators", [(accelerator.name, _accelerator(accelerator)) for accelerator in report.accelerators]
        ),
        *([_section("TPU", [(name, Text(value)) for name, value in report.tpu])] if report.tpu else []),
        _section("Packages", [(package.name, _package(package)) for package in report.packages + report.extras]),
        *(Text(f"problem: {problem}", style="bold red") for problem in report.problems),
        *(Text(f"advice: {advice}", style="yellow") for advice in report.advice),
        _conclusion(report),
    )


def _section(title: str, rows: list[Row]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name, style="cyan"), text)
    return Group(Text(title, style="bold"), Padding(table, (0, 0, 1, 2)))


def _machine(report: Report) -> list[Row]:
    machine = report.machine
    memory = f"{readable_size(machine.memory_bytes)}, {readable_size(machine.memory_free_bytes)} free"
    if machine.memory_limit_bytes is not None:
        memory += f"; this container may use {readable_size(machine.memory_limit_bytes)}"
    facts = {
        "system": machine.system,
        "cpu": machine.cpu,
        "cores": f"{machine.usable_cores:g} usable of {machine.cores}; torch uses {report.torch_threads} thread(s)",
        "memory": memory,
        "/dev/shm": "none" if machine.shm_bytes is None else readable_size(machine.shm_bytes),
        "disk": f"{readable_size(machine.disk_free_bytes)} free in {machine.directory}",
        "python": report.python,
        "footplate": report.footplate,
    }
    return [(name, Text(value)) for name, value in facts.items()]


def _accelerator(accelerator: AcceleratorReport) -> Text:
    if accelerator.reason is not None:
        return Text.assemble(("not usable: ", "red"), accelerator.reason)
    text = Text.assemble(("usable", "green"))
    for device in accelerator.devices:
        memory = f", {readable_size(device.memory_bytes)}" if device.memory_bytes is not None else ""
        text.append(f"\n{accelerator.name}:{device.index}  {device.name}{memory}")
    text.append(f"\nprecisions: {', '.join(accelerator.precisions)}")
    for name, value in accelerator.details:
        text.append(f"\n{name}: {value}")
    return text


def _package(package: Package) -> Text:
    if package.version is None:
        return Text.assemble(("not installed", "yellow"), f", for {package.purpose}: {package.install}")
    return Text.assemble(package.version, ("" if package.problem is None else "  (see below)", "red"))


def _conclusion(report: Report) -> Text:
    if not report.ok:
        return Text("Training can't work here until the problems are solved.", style="bold red")
    best = next(accelerator.name for accelerator in report.accelerators if accelerator.usable)
    return Text(f'Training can work here; accelerator="auto" is {best}.', style="bold green")

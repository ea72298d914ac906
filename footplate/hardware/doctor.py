"""`footplate doctor`: what this machine has, what can be used, and why the rest can't.

    examine()            →  Report       looks, changes nothing, wakes no GPU
    to_dict(report)      →  plain data   for --json
    render(report)       →  for a terminal

The report holds facts (machine, packages, accelerators) and two kinds of conclusions drawn from them: problems, with
which nothing can train here, and advice on what makes training slow or fail later.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from footplate.hardware.base import Accelerator, Device
from footplate.hardware.machine import Machine, examine_machine, readable_size
from footplate.hardware.packages import Package, optional_packages, required_packages
from footplate.hardware.registry import accelerators, why_unavailable
from footplate.hardware.tpu import findings
from footplate.hardware.xla import tpu_chips

if TYPE_CHECKING:
    from rich.console import RenderableType

_SMALL_SHM = 256 * 2**20  # Docker's default is 64 MiB, a few batches of images
_SMALL_DISK = 2 * 2**30  # a handful of checkpoints of a middling model


@dataclass(frozen=True)
class AcceleratorReport:
    """One accelerator as it stands here.

    Attributes:
        name: what `Trainer(accelerator=…)` is given.
        reason: why it can't be used and what would make it so; None when it can.
        devices: its devices; empty when it can't be used.
        precisions: what `Trainer(precision=…)` may be with it.
        details: versions of its driver and runtime.
    """

    name: str
    reason: str | None
    devices: tuple[Device, ...] = ()
    precisions: tuple[str, ...] = ()
    details: tuple[tuple[str, str], ...] = ()

    @property
    def usable(self) -> bool:
        """Whether it can train here."""
        return self.reason is None


@dataclass(frozen=True)
class Report:
    """All that `footplate doctor` finds.

    Attributes:
        footplate: Footplate's version.
        python: Python's version.
        machine: processor, memory, disk.
        torch_threads: the threads that torch spreads one operation over.
        packages: the required packages.
        extras: the optional packages.
        accelerators: all known accelerators, the one that `"auto"` prefers first.
        tpu: which TPU this machine has a part of, and which part, as far as anything says so.
        problems: what keeps anything from training here, each with its remedy.
        advice: what makes training slow or fail later, each with its remedy.
    """

    footplate: str
    python: str
    machine: Machine
    torch_threads: int
    packages: tuple[Package, ...]
    extras: tuple[Package, ...]
    accelerators: tuple[AcceleratorReport, ...]
    tpu: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether training can work here."""
        return not self.problems and any(accelerator.usable for accelerator in self.accelerators)


def examine() -> Report:
    """Look at this machine, its packages and its accelerators. Takes well under two seconds and initialises no GPU."""
    import torch

    from footplate.core.version import __version__

    machine, threads = examine_machine(), torch.get_num_threads()
    packages, extras = required_packages(), optional_packages()
    tpu = findings.examine(os.environ, len(tpu_chips()))
    return Report(
        footplate=__version__,
        python=platform.python_version(),
        machine=machine,
        torch_threads=threads,
        packages=packages,
        extras=extras,
        accelerators=tuple(examine_accelerator(accelerator) for accelerator in accelerators()),
        tpu=tpu.facts,
        problems=tuple(package.problem for package in packages if package.problem),
        advice=(*advise(machine, threads, extras), *tpu.advice),
    )


def examine_accelerator(accelerator: Accelerator) -> AcceleratorReport:
    """Ask an accelerator about itself. One that fails to answer is reported as not usable, with its error."""
    reason = why_unavailable(accelerator)
    precisions = tuple(sorted(accelerator.precisions))
    if reason is not None:
        return AcceleratorReport(accelerator.name, reason, precisions=precisions)
    try:
        devices = tuple(accelerator.devices())
        details = tuple((key, str(value)) for key, value in accelerator.describe().items())
    except Exception as error:
        reason = f"it says that it can be used, but fails to describe itself ({type(error).__name__}: {error})."
        return AcceleratorReport(accelerator.name, reason, precisions=precisions)
    return AcceleratorReport(accelerator.name, None, devices, precisions, details)


def advise(machine: Machine, torch_threads: int, extras: tuple[Package, ...]) -> list[str]:
    """What is known to make training slow here, or to fail later."""
    cores = machine.usable_cores
    advice = []
    if torch_threads > max(1, cores):
        advice.append(
            f"torch runs {torch_threads} threads on {cores:g} usable core(s), so they wait for each other: "
            f"set OMP_NUM_THREADS={max(1, int(cores))}."
        )
    elif torch_threads <= cores / 4:
        advice.append(
            f"torch runs {torch_threads} thread(s) on {cores:g} usable cores: unset OMP_NUM_THREADS, or set it higher, "
            "to train on the CPU."
        )
    if machine.shm_bytes is not None and machine.shm_bytes < _SMALL_SHM:
        advice.append(
            f"/dev/shm has {readable_size(machine.shm_bytes)}, and loader workers hand over batches through it: "
            "start the container with --shm-size=2g or --ipc=host."
        )
    if machine.disk_free_bytes < _SMALL_DISK:
        advice.append(
            f"{machine.directory} has {readable_size(machine.disk_free_bytes)} left, and checkpoints go there: "
            "free some space, or give Trainer another default_root_dir."
        )
    if any(extra.name == "opencv-python-headless" and extra.version is None for extra in extras):
        advice.append('no decoder for images: tables of images need pip install "footplate[images]".')
    return advice


def to_dict(report: Report) -> dict[str, Any]:
    """The report as plain data: what `footplate doctor --json` prints."""
    plain = asdict(report)
    for kept, accelerator in zip(plain["accelerators"], report.accelerators, strict=True):
        kept["usable"] = accelerator.usable
        kept["details"] = dict(accelerator.details)
    return {"ok": report.ok, **plain, "tpu": dict(report.tpu)}


def render(report: Report) -> RenderableType:
    """The report for a terminal."""
    from footplate.hardware.doctor_page import page

    return page(report)

"""`footplate doctor`: a report on this machine, its packages and its accelerators, with problems and advice.

    examine()            →  Report       reads only, and wakes no GPU
    to_dict(report)      →  plain data   for --format json|yaml
    page(report)         →  for a terminal

The report holds facts (machine, packages, accelerators) and two kinds of conclusions: problems that prevent all training,
and advice about causes of slow training or later failures.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from footplate.hardware.base import Accelerator, Device
from footplate.hardware.machine import Machine, examine_machine, readable_size
from footplate.hardware.packages import Package, optional_packages, required_packages
from footplate.hardware.registry import accelerators, why_unavailable
from footplate.hardware.tpu.report import examine_tpu
from footplate.hardware.xla import tpu_chips

if TYPE_CHECKING:
    pass

# Docker's default is 64 MiB: a few batches of images.
_SMALL_SHM = 256 * 2**20
# A few checkpoints of a medium-sized model.
_SMALL_DISK = 2 * 2**30
_MUCH_FASTER = 1.5


@dataclass(frozen=True)
class AcceleratorReport:
    """The state of an accelerator on this machine.

    Attributes:
        name: its name in `Trainer(accelerator=…)`.
        reason: why it can't be used, and the solution; None if it can.
        devices: its devices; empty if it can't be used.
        precisions: its values of `Trainer(precision=…)`.
        details: versions of its driver and runtime.
    """

    name: str
    reason: str | None
    devices: tuple[Device, ...] = ()
    precisions: tuple[str, ...] = ()
    details: tuple[tuple[str, str], ...] = ()

    @property
    def usable(self) -> bool:
        """True if it can train on this machine."""
        return self.reason is None


@dataclass(frozen=True)
class Report:
    """The report of `footplate doctor`.

    Attributes:
        footplate: Footplate's version.
        python: Python's version.
        machine: processor, memory, disk.
        torch_threads: torch's threads for one operation.
        packages: the required packages.
        extras: the optional packages.
        accelerators: all known accelerators, in `"auto"`'s order of preference.
        tpu: the TPU slice of this machine, and this host's position in it, if known.
        problems: everything that prevents training, each with its solution.
        advice: causes of slow training or later failures, each with its solution.
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
        """True if training can work on this machine."""
        return not self.problems and any(accelerator.usable for accelerator in self.accelerators)


def examine() -> Report:
    """Examine this machine, its packages and its accelerators, in well under two seconds and without initialising a GPU."""
    import torch

    from footplate.core.version import __version__

    machine, threads = examine_machine(), torch.get_num_threads()
    packages, extras = required_packages(), optional_packages()
    tpu = examine_tpu(os.environ, len(tpu_chips()))
    reports = tuple(examine_accelerator(accelerator) for accelerator in accelerators())
    return Report(
        footplate=__version__,
        python=platform.python_version(),
        machine=machine,
        torch_threads=threads,
        packages=packages,
        extras=extras,
        accelerators=reports,
        tpu=tpu.facts,
        problems=tuple(package.problem for package in packages if package.problem),
        advice=(*advise(machine, threads, extras), *faster_types(reports), *tpu.advice),
    )


def examine_accelerator(accelerator: Accelerator) -> AcceleratorReport:
    """Examine an accelerator. If it raises an error, it is reported as not usable, with the error."""
    reason = why_unavailable(accelerator)
    precisions = tuple(sorted(accelerator.precisions))
    if reason is not None:
        return AcceleratorReport(accelerator.name, reason, precisions=precisions)
    try:
        devices = tuple(accelerator.devices())
        details = tuple((key, str(value)) for key, value in accelerator.describe().items())
    except Exception as error:
        reason = f"it reports that it is usable, but describing it failed ({type(error).__name__}: {error})."
        return AcceleratorReport(accelerator.name, reason, precisions=precisions)
    return AcceleratorReport(accelerator.name, None, devices, precisions, details)


def advise(machine: Machine, torch_threads: int, extras: tuple[Package, ...]) -> list[str]:
    """List causes of slow training or later failures on this machine."""
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
            f"/dev/shm has {readable_size(machine.shm_bytes)}, and loader workers send batches through it: "
            "start the container with --shm-size=2g or --ipc=host."
        )
    if machine.disk_free_bytes < _SMALL_DISK:
        advice.append(
            f"{machine.directory} has {readable_size(machine.disk_free_bytes)} left for checkpoints: "
            "free some space, or set another default_root_dir."
        )
    if any(extra.name == "opencv-python-headless" and extra.version is None for extra in extras):
        advice.append('there is no decoder for images: for tables of images, pip install "footplate[images]".')
    return advice


def faster_types(reports: Iterable[AcceleratorReport]) -> list[str]:
    """Advise bfloat16 on devices that multiply it much faster than float32.

    It is the monitor's rule about precision (`monitoring/rules.py`), as far as that needs no training. The rates of this
    CPU are measured, in a third of a second. Those of GPUs and TPUs come from the catalog, by the names of the devices, so
    no device is woken.
    """
    names = {device.name for report in reports if report.name != "cpu" for device in report.devices}
    gains = {f"{name} multiplies": gain for name in sorted(names) if (gain := _gain_of(name)) is not None}
    gains["this CPU multiplies"] = _gain_of_cpu()
    return [
        f"{multiplies} matrices in bfloat16 {gain:.1f} times as fast as in float32: for models of large layers, try "
        'Trainer(precision="bf16-mixed").'
        for multiplies, gain in gains.items()
        if gain >= _MUCH_FASTER
    ]


def _gain_of_cpu() -> float:
    import torch

    from footplate.hardware import cpu_rates

    return cpu_rates.flops_per_s(torch.bfloat16) / cpu_rates.flops_per_s(torch.float32)


def _gain_of(name: str) -> float | None:
    """Return how much faster a device of the catalog multiplies bfloat16; None for any other device."""
    from footplate.catalog.peak_rates import gpu_of, products_per_s, tpu_products_per_s

    gpu = gpu_of(name)
    slow, fast = (
        tpu_products_per_s(name, precision) if gpu is None else products_per_s(gpu, precision)
        for precision in ("32-true", "bf16-mixed")
    )
    return fast / slow if fast and slow else None


def to_dict(report: Report) -> dict[str, Any]:
    """Convert the report to plain data, for `footplate doctor --format json`."""
    plain = asdict(report)
    for entry, accelerator in zip(plain["accelerators"], report.accelerators, strict=True):
        entry["usable"] = accelerator.usable
        entry["details"] = dict(accelerator.details)
    return {"ok": report.ok, **plain, "tpu": dict(report.tpu)}

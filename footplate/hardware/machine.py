"""The resources that this process may use, which are often less than the machine has.

A container sees the host's 64 cores and 256 GB, but its control group ("cgroup") may limit it to 2 cores and 8 GB. The
smallest of three values counts: the hardware, the process's affinity, and the limit of every cgroup above the process. Both
versions of cgroups are read. In version 2, one tree has all limits. In version 1, each kind of limit has its own tree.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CORES_V2, _CORES_V1 = "cpu.max", "cpu.cfs_quota_us"
_MEMORY_V2, _MEMORY_V1 = "memory.max", "memory.limit_in_bytes"


@dataclass(frozen=True)
class Limits:
    """The limits of this process's control groups; None without a limit."""

    cores: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Machine:
    """The resources for training.

    Attributes:
        system: the operating system and its version.
        cpu: the processor's model.
        cores: logical cores of the machine.
        usable_cores: cores that this process may use; may be a fraction in a container.
        memory_bytes: the machine's memory.
        memory_free_bytes: memory available without swapping.
        memory_limit_bytes: the container's limit; None without a limit.
        directory: the working directory.
        disk_free_bytes: free space in that directory.
        shm_bytes: the size of `/dev/shm`, through which loader workers send batches; None if there is none.
    """

    system: str
    cpu: str
    cores: int
    usable_cores: float
    memory_bytes: int
    memory_free_bytes: int
    memory_limit_bytes: int | None
    directory: str
    disk_free_bytes: int
    shm_bytes: int | None


def examine_machine() -> Machine:
    """Examine this machine. Reads a few small files and starts no process."""
    import psutil

    memory = psutil.virtual_memory()
    limit = cgroup_limits().memory_bytes
    shm = Path("/dev/shm")
    return Machine(
        system=_system(),
        cpu=cpu_model(),
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
        memory_limit_bytes=limit if limit is not None and limit < memory.total else None,
        directory=str(Path.cwd()),
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
    )


def usable_cores() -> float:
    """Return the logical cores that this process may use: the smaller of its affinity and its container's limit."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = cgroup_limits().cores
    return float(bound) if granted is None else min(float(bound), granted)


def cpu_model() -> str:
    """Return the processor's model, or its architecture if the model is unknown."""
    import platform

    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def system_text(file: Path) -> str:
    """Return the text of a small file, such as those in `/proc` and `/sys`. Empty if it can't be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def readable_size(nbytes: int) -> str:
    """Format a number of bytes: "7.9 GiB" or "64 MiB"."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def _system() -> str:
    import platform

    if sys.platform == "linux":
        try:
            name = platform.freedesktop_os_release()["PRETTY_NAME"]
        except (OSError, KeyError):
            name = "Linux"
        return f"{name}, kernel {platform.release()}, {platform.machine()}"
    return f"{platform.platform()}, {platform.machine()}"


def cgroup_limits(root: Path = Path("/")) -> Limits:
    """Return the lowest limits of all control groups of this process.

    Args:
        root: the directory of `proc` and `sys`.
    """
    cores: list[float] = []
    memory: list[int] = []
    for group in _groups(root):
        cores += _cores(group)
        memory += _bytes(group)
    return Limits(cores=min(cores, default=None), memory_bytes=min(memory, default=None))


def _groups(root: Path) -> Iterator[Path]:
    """Yield the directories of this process's control groups in every hierarchy, from its own up to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        mounts = [name for name in ("", "unified") if not kinds] or [kinds, *kinds.split(",")]
        for mount in dict.fromkeys(mounts):
            top = root / "sys/fs/cgroup" / mount
            own = top / path.lstrip("/")
            yield from (own, *(parent for parent in own.parents if parent.is_relative_to(top)))


def _cores(group: Path) -> list[float]:
    quota, period = "max", "100000"
    if text := system_text(group / _CORES_V2):
        quota, period = text.split()
    elif text := system_text(group / _CORES_V1):
        quota, period = text, system_text(group / "cpu.cfs_period_us") or period
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


def _bytes(group: Path) -> list[int]:
    text = system_text(group / _MEMORY_V2) or system_text(group / _MEMORY_V1) or "max"
    return [] if text == "max" else [int(text)]

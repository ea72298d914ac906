"""The machine that this process may use, which is often less than the machine it runs on.

A container sees the host's 64 cores and 256 GB, while its control group ("cgroup") grants it 2 and 8. What counts is
the smallest of what the hardware has, what the process is bound to (its affinity) and what any cgroup above it grants.
Both versions of cgroups are read: in version 2 one tree has all limits, in version 1 each kind of limit has its own.
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
    """What the control groups of this process grant; None where they set no limit."""

    cores: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Machine:
    """What training has to work with.

    Attributes:
        system: the operating system and its version.
        cpu: the processor's model.
        cores: logical cores of the machine.
        usable_cores: those that this process may use; a fraction where a container grants one.
        memory_bytes: the machine's memory.
        memory_free_bytes: what of it can be had without swapping.
        memory_limit_bytes: the most that the container may use; None without a limit.
        directory: the working directory.
        disk_free_bytes: free space there.
        shm_bytes: the size of `/dev/shm`, through which loader workers hand over batches; None where there is none.
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
    """Look at this machine; reads a few small files and starts nothing."""
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
    """The logical cores that this process may keep busy: the smaller of its affinity and its container's grant."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = cgroup_limits().cores
    return float(bound) if granted is None else min(float(bound), granted)


def cpu_model() -> str:
    """The processor's model as it calls itself, or its architecture where it doesn't."""
    import platform

    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def readable_size(nbytes: int) -> str:
    """A number of bytes for people: "7.9 GiB" or "64 MiB"."""
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
    """The tightest limits of the control groups that this process is in.

    Args:
        root: where `proc` and `sys` are.
    """
    cores: list[float] = []
    memory: list[int] = []
    for group in _groups(root):
        cores += _cores(group)
        memory += _bytes(group)
    return Limits(cores=min(cores, default=None), memory_bytes=min(memory, default=None))


def _groups(root: Path) -> Iterator[Path]:
    """Every directory of every control group hierarchy of this process, from its own up to the top."""
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
    if text := _read(group / _CORES_V2):
        quota, period = text.split()
    elif text := _read(group / _CORES_V1):
        quota, period = text, _read(group / "cpu.cfs_period_us") or period
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


def _bytes(group: Path) -> list[int]:
    text = _read(group / _MEMORY_V2) or _read(group / _MEMORY_V1) or "max"
    return [] if text == "max" else [int(text)]


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""

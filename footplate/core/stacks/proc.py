"""States, children and descriptors of processes, from /proc. All functions return nothing for a process that is gone."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from footplate.core.stacks.snapshot import State

_STATES: dict[str, State] = {
    "R": "running", "S": "asleep", "I": "asleep", "D": "uninterruptible", "T": "stopped", "t": "traced", "Z": "ended",
    "X": "ended",
}  # fmt: skip


def state_of(pid: int) -> tuple[State, str] | None:
    """The state of a process's main thread, and the process's name; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    return _STATES.get(rest.split()[0], "asleep"), name


def waits_in(pid: int) -> str:
    """The kernel's function in which the main thread sleeps; empty if the kernel doesn't tell."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/wchan").read_text().strip()
        return "" if text == "0" else text
    return ""


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it has none."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def children() -> dict[int, list[int]]:
    """The children of each process of this machine."""
    children_of: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children_of.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
    return children_of


def descriptors(pid: int, prefixes: Iterable[str]) -> dict[str, str]:
    """The memory files that a process has open, by name: the path to open each. Only names with these prefixes."""
    wanted, targets = tuple(prefixes), dict[str, str]()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                name = str(entry.readlink()).removeprefix("/memfd:").removesuffix(" (deleted)")
                if name.startswith(wanted):
                    targets[name] = str(entry)
    return targets


def open_memory_file(pid: int, name: str, flags: int) -> int:
    """Open a memory file that a process has open. The caller closes it.

    Raises:
        FileNotFoundError: it has no such file, or has closed it.
        OSError: it may not be opened.
    """
    path = descriptors(pid, (name,)).get(name)
    if path is None:
        raise FileNotFoundError(f"process {pid} has no file {name}")
    opened = os.open(path, flags | os.O_CLOEXEC)
    # The process may have closed it, and opened another file under the same number.
    if str(Path(f"/proc/self/fd/{opened}").readlink()) != f"/memfd:{name} (deleted)":
        os.close(opened)
        raise FileNotFoundError(f"process {pid} has no file {name}")
    return opened


def open_pipe(pid: int, number: int, inode: int) -> int:
    """Open a pipe of a process for writing, without waiting. The caller closes it.

    Args:
        pid: the process.
        number: the process's descriptor of the pipe.
        inode: the pipe's inode. Another file may have the number by now.

    Raises:
        FileNotFoundError: the process has closed it.
        OSError: it may not be opened.
    """
    opened = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if os.fstat(opened).st_ino != inode or not stat.S_ISFIFO(os.fstat(opened).st_mode):
        os.close(opened)
        raise FileNotFoundError(f"process {pid} has closed its pipe {number}")
    return opened


def catches(pid: int, signum: int) -> bool:
    """Return True if a process has a handler for a signal."""
    return bool(_mask(f"/proc/{pid}/status", "SigCgt") >> (signum - 1) & 1)


def has_runnable_thread(pid: int) -> bool:
    """Return True if a thread runs or waits for a processor, other than the main thread."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            if task.name != str(pid) and (task / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


def handling(pid: int, signum: int) -> set[str]:
    """The threads that have a signal pending or blocked, as they do while they handle it."""
    bit, threads = 1 << (signum - 1), set[str]()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            if any(_mask(f"{task}/status", field) & bit for field in ("SigPnd", "ShdPnd", "SigBlk")):
                threads.add(task.name)
    return threads


def _mask(status: str, field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(status).read_text(errors="replace").splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1], 16)
    return 0

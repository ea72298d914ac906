"""The environment of a process: a marker that other processes can read, and the variables that imports have read.

**A marker.** `kill_marked` finds the processes of a job by a variable in `/proc/PID/environ`. The kernel shows there what a
process was *started* with, and a fork was started with nothing. So the fork server is started with a placeholder for the
variable (`placeholder`), and a fork writes the value over it (`Marker.set`). Its own children inherit that.

**Variables that imports read.** A fork gets some variables after the imports were done in the fork server. If an import has
asked for one of them, the fork isn't what a new interpreter would be. `reads_of` records what a function asks for. A
library that lists all variables (tqdm, for those that begin with `TQDM_`) asks for those that are set.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

# Longer than the id of any job.
_PLACEHOLDER_BYTES = 160
# Fields of /proc/PID/stat after the name in brackets (proc(5), env_start and env_end).
_ENV_START, _ENV_END = 47, 48


def placeholder() -> str:
    """The value that a process must be started with, so that its forks can have a marker."""
    return "-" * _PLACEHOLDER_BYTES


class Marker:
    """The place of a variable in the memory that the kernel shows as this process's environment.

    Make it before the environment changes, in a process that was started with a `placeholder`.

    Args:
        name: the name of the variable.

    Attributes:
        name: the same.

    Raises:
        OSError: the kernel doesn't show the environment, or the placeholder isn't there.
    """

    def __init__(self, name: str) -> None:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
        assignment = b"\0" + os.fsencode(f"{name}={placeholder()}") + b"\0"
        at = (b"\0" + ctypes.string_at(start, end - start)).find(assignment)
        if at < 0:
            raise OSError(f"{name} can't be found in this process's environment")
        self.name = name
        self._at = start + at + len(os.fsencode(name)) + 1
        # The C library finds variables in this memory, too. From now on it doesn't find this one.
        os.environ.pop(name, None)

    def set(self, value: str) -> None:
        """Set the variable for this process, and show it to other processes.

        Raises:
            ValueError: the value is too long.
        """
        encoded = os.fsencode(value)
        if len(encoded) > _PLACEHOLDER_BYTES:
            raise ValueError(f"{self.name} has more than {_PLACEHOLDER_BYTES} bytes")
        ctypes.memmove(self._at, encoded.ljust(_PLACEHOLDER_BYTES, b"\0"), _PLACEHOLDER_BYTES)
        os.environ[self.name] = value


def reads_of(function: Callable[[], None]) -> frozenset[str]:
    """Call a function. Returns the names of the variables that its Python code asked for, whether they are set or not."""
    names: set[str] = set()
    plain = type(os.environ)

    class Recording(plain):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
        def __getitem__(self, name: str) -> str:
            names.add(name)
            return super().__getitem__(name)

        def __contains__(self, name: object) -> bool:
            names.add(str(name))
            return super().__contains__(name)

    # `os.getenv` and `os.environ.get` look up names in this object, too.
    os.environ.__class__ = Recording
    try:
        function()
    finally:
        os.environ.__class__ = plain
    return frozenset(names)

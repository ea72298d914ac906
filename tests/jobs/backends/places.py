"""Backends for the conformance suite, with faults that a job can't cause itself.

All cases apply to all backends. `Kind` describes the visible differences between backends, and their reasons.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from footplate.jobs.supervision.identity import Identity
from jobs.conftest import Bench, until


@dataclass(frozen=True)
class Kind:
    """Visible properties of jobs on a backend.

    Attributes:
        backend: its name.
        bucket: the bucket above the job directories; None if they are on this machine's disk. Vertex AI's machines can't
            see our disk.
        tells_each_end: True if the end of each replica is reported. Vertex AI reports the exit code of one replica only,
            and none for a job that has succeeded, which means that its master succeeded. The other replicas "ended with
            its job".
        keeps_bytes: True if output is kept byte for byte. Cloud Logging keeps entries, and each becomes a line, including a
            last one without a line end.
        requeues: True if the backend begins the next attempt itself after a machine was lost. Then the supervisor counts no
            loss.
    """

    backend: str
    bucket: str | None = None
    tells_each_end: bool = True
    keeps_bytes: bool = True
    requeues: bool = False


class Place(Protocol):
    """A real instance of a backend."""

    @property
    def kind(self) -> Kind:
        """Its visible properties."""
        ...

    @property
    def options(self) -> Mapping[str, str]:
        """The command-line options of this instance."""
        ...

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables of this instance."""
        ...

    def lose_a_machine(self, bench: Bench) -> None:
        """Kill a machine that runs replicas of `my_job`, as abruptly as possible."""
        ...

    def close(self) -> None:
        """Clean up after a test: no process of its jobs may remain."""
        ...


class ThisMachine:
    """The local backend."""

    kind = Kind("local")
    options: Mapping[str, str] = MappingProxyType({})
    variables = options

    def lose_a_machine(self, bench: Bench) -> None:
        """Simulate a power cut: all processes of the job are gone, and the machine has rebooted."""
        pid = bench.supervisor()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until(lambda: Identity.of(pid) is None)
        bench.jobs.store.own("my_job", {"pid": os.getpid(), "began": 1.0, "boot": "another"})

    def close(self) -> None:
        """Nothing to do: the bench ends all remaining processes."""

"""Places in which the conformance suite runs jobs, and what can happen there that no job can do to itself.

All cases hold in all places. Where what is to be seen of them differs, `Kind` says in what, and why it must.
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
    """What is to be seen of jobs in the places of a backend.

    Attributes:
        backend: its name.
        bucket: below it job directories lie; None: on this machine's disk. Vertex AI's machines see none of ours.
        tells_each_end: whether each replica's end is told. Vertex AI tells an exit code of one replica, and of a job that
            has succeeded, none: so did its master. The others "ended with its job".
        keeps_bytes: whether output is kept as it was written. Cloud Logging keeps entries, and each becomes a line, the
            last one too, if it had no end.
    """

    backend: str
    bucket: str | None = None
    tells_each_end: bool = True
    keeps_bytes: bool = True


class Place(Protocol):
    """A real place of a backend's kind."""

    @property
    def kind(self) -> Kind:
        """What it is like."""
        ...

    @property
    def options(self) -> Mapping[str, str]:
        """Those of the command line by which it is found."""
        ...

    @property
    def variables(self) -> Mapping[str, str]:
        """Those of the environment by which it is found."""
        ...

    def lose_a_machine(self, bench: Bench) -> None:
        """Have a machine die that runs replicas of `my_job`, as hard as can be."""
        ...

    def close(self) -> None:
        """A test is over: nothing of its jobs may be left."""
        ...


class ThisMachine:
    """The local backend."""

    kind = Kind("local")
    options: Mapping[str, str] = MappingProxyType({})
    variables = options

    def lose_a_machine(self, bench: Bench) -> None:
        """As after a power cut: of the job nothing is left, and the machine has started anew."""
        pid = bench.supervisor()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until(lambda: Identity.of(pid) is None)
        bench.jobs.store.own("my_job", {"pid": os.getpid(), "began": 1.0, "boot": "another"})

    def close(self) -> None:
        """The bench ends what is left."""

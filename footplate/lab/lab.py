"""The lab itself: its machines, and what can happen to the network between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from footplate.core.errors import ConfigError, LaunchError
from footplate.lab import namespaces
from footplate.lab.machine import SHARED, Machine, ask
from footplate.lab.network import SOCKET, Link

MAX_MACHINES = 100
START_S = 20.0
STATE = "lab.json"
LOG = "switch.log"


class Lab:
    """A number of machines on this host.

        with Lab(3) as lab:
            first, second, third = lab.machines
            training = first.start(["footplate", "run", …])
            lab.cut(second)

    They have the addresses 10.77.0.10, 10.77.0.11, … and the names m0, m1, … No packet leaves the lab. When the block is
    left, or this process dies, everything in the lab is killed.

    Args:
        count: how many machines.
        directory: where their files are; by default a temporary directory, which is deleted at the end.
        keep: let the lab run when this process has ended. `Lab.running` finds it again.

    Attributes:
        directory: where their files are.
        machines: all machines.

    Raises:
        ConfigError: the number is out of range; a lab runs in this directory already.
        LaunchError: this system, or this user, can't make a lab.

    Examples:
        >>> from footplate.lab import Lab
        >>> with Lab(2) as lab:
        ...     first, second = lab.machines
        ...     lab.cut(second)  # a training on both would wait for its messages now
        ...     lab.heal()
    """

    def __init__(self, count: int, directory: str | os.PathLike[str] | None = None, *, keep: bool = False) -> None:
        if not 1 <= count <= MAX_MACHINES:
            raise ConfigError(f"count={count}: expected 1 to {MAX_MACHINES} machines.")
        if why := namespaces.why_not():
            raise LaunchError(why)
        if directory is not None and _holder(Path(directory)) is not None:
            raise ConfigError(f"{directory}: a lab runs here already. Stop it first, or use another directory.")
        self._temporary = directory is None
        self.directory = Path(directory or tempfile.mkdtemp(prefix="footplate-lab-")).resolve()
        self.shared.mkdir(parents=True, exist_ok=True)
        self._process = _start_switch(self.directory, keep)
        try:
            switch = namespaces.only_child(self._process)
            self._await_switch()
            state = {"process": self._process.pid, "switch": switch, "count": count}
            (self.directory / STATE).write_text(json.dumps(state))
            self.machines = [Machine(self.directory, switch, index) for index in range(count)]
            for machine in self.machines:
                machine.boot()
        except BaseException:
            self.close()
            raise

    @classmethod
    def running(cls, directory: str | os.PathLike[str]) -> Lab:
        """The lab that runs in a directory.

        Raises:
            ConfigError: there is none.
        """
        state = _holder(Path(directory))
        if state is None:
            raise ConfigError(f"{directory}: no lab runs here.")
        lab = cls.__new__(cls)
        lab.directory, lab._temporary, lab._process = Path(directory).resolve(), False, None
        lab.machines = [Machine(lab.directory, state["switch"], index) for index in range(state["count"])]
        return lab

    @property
    def shared(self) -> Path:
        """Their shared disk, as this machine sees it. They see it as `/mnt`."""
        return self.directory / SHARED

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill everything in the lab."""
        state = _holder(self.directory)
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        elif state is not None:
            # All of the lab is in the PID namespace of the switch, which the kernel kills with `unshare`, its parent.
            os.kill(state["process"], signal.SIGKILL)
        (self.directory / STATE).unlink(missing_ok=True)
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def cut(self, *machines: Machine) -> None:
        """Cut machines off from all others. Neither side is notified, so connections stay half-open."""
        for machine in machines:
            self.partition([machine], self.machines)
            self.partition(self.machines, [machine])

    def partition(self, sources: Iterable[Machine], destinations: Collection[Machine]) -> None:
        """Drop all frames from one group of machines to another. The way back stays as it is."""
        for source in sources:
            for destination in destinations:
                self._change(source, destination, {"connected": False})

    def shape(
        self,
        machine: Machine,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        bytes_per_s: float | None = None,
    ) -> None:
        """Slow a machine's connections to all others, in both directions; see `Link`. By default, restore full speed.

        Raises:
            ConfigError: a value is out of range.
        """
        link = Link(True, delay_s, jitter_s, loss, bytes_per_s)
        fields = {name: value for name, value in asdict(link).items() if name != "connected"}
        for other in self.machines:
            self._change(machine, other, fields)
            self._change(other, machine, fields)

    def heal(self) -> None:
        """Connect all machines again, at full speed."""
        for source in self.machines:
            for destination in self.machines:
                self._change(source, destination, asdict(Link()))

    def firewall(self, machine: Machine, open_ports: Collection[int] | None) -> None:
        """Let connections in at these TCP ports of a machine only; None opens all. Connections that are open stay so."""
        ports = None if open_ports is None else sorted(open_ports)
        ask(self.directory, {"do": "firewall", "machine": machine.name, "open": ports})

    def _change(self, source: Machine, destination: Machine, fields: Mapping[str, object]) -> None:
        if source is not destination:
            ask(self.directory, {"do": "link", "from": source.name, "to": destination.name, "link": fields})

    def _await_switch(self) -> None:
        until = time.monotonic() + START_S
        while not (self.directory / SOCKET).exists():
            if self._process is None or self._process.poll() is not None or time.monotonic() > until:
                said = (self.directory / LOG).read_text(errors="replace").strip()
                raise LaunchError(f"The lab's switch can't be started: {said or 'it printed no reason.'}")
            time.sleep(0.005)


def _start_switch(directory: Path, keep: bool) -> subprocess.Popen[bytes]:
    (directory / SOCKET).unlink(missing_ok=True)
    user = ["user", "map-root-user"] if namespaces.needs_user_namespace() else []
    words = [*namespaces.make(*user, "net", "pid"), sys.executable, "-m", "footplate.lab.switch"]
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    with (directory / LOG).open("wb") as log:
        return subprocess.Popen(
            words + ["--keep"] * keep, cwd=directory, stdin=subprocess.PIPE, stdout=log, stderr=log,
            start_new_session=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip


def _holder(directory: Path) -> dict[str, int] | None:
    """The state of the lab that runs in a directory; None if there is none."""
    try:
        state = json.loads((directory / STATE).read_text())
        words = Path(f"/proc/{state['switch']}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return state if b"footplate.lab.switch" in words else None

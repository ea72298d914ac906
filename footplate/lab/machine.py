"""A machine of the lab: boot it, run commands on it, take its power away.

Its state is in files of the lab's directory, so that another process may go on with it:

    DIR/m0/pid       its first process, while it is up
    DIR/m0/address   the address that it has, or had
    DIR/m0/home      its /home; likewise tmp, and etc for hosts, hostname and resolv.conf
    DIR/shared       the /mnt of all machines: their shared disk, which no cut reaches
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from footplate.core.errors import ConfigError, LaunchError
from footplate.lab import namespaces
from footplate.lab.network import NETWORKS, SOCKET, interface_of

NETWORK, SECOND_NETWORK = ipaddress.IPv4Network("10.77.0.0/24"), ipaddress.IPv4Network("10.78.0.0/24")
SHARED = "shared"
HOME = "/home/lab"
PASSED_ON = (
    "FOOTPLATE_TOKEN", "LANG", "LC_ALL", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
OWN_NAMESPACES = ("net", "uts", "ipc", "mount", "pid")
DOWN_S = 10.0
# The monotonic clocks of two machines differ by this at least, as clocks that count from the boot do.
CLOCK_STEP_S = 10_000
_FIRST_PROCESS = "footplate.lab.machine_init"


class Command:
    """A command that runs on a machine.

    Attributes:
        stdout: its output, if it was asked for with `subprocess.PIPE`.

    Examples:
        >>> from footplate.lab import Lab
        >>> with Lab(1) as lab:
        ...     command = lab.machines[0].start(["hostname"])
        ...     command.wait()
        0
    """

    def __init__(self, entered: subprocess.Popen[Any]) -> None:
        # `nsenter` waits for the command, and ends as it does.
        self._entered = entered
        self.stdout: IO[Any] | None = entered.stdout

    @property
    def pid(self) -> int | None:
        """Its process, as this machine counts; None if it has ended."""
        children = namespaces.children(self._entered.pid) if self.returncode is None else []
        return children[0] if children else None

    @property
    def returncode(self) -> int | None:
        """Its exit code, or the number of a signal made negative; None while it runs."""
        return self._entered.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        return self._entered.wait(timeout_s)

    def communicate(self, timeout_s: float | None = None) -> tuple[int, str]:
        """Read its output to the end, and wait for its end; return its exit code and the output.

        Raises:
            subprocess.TimeoutExpired: it didn't end in time. It is killed.
        """
        try:
            output, _ = self._entered.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
            self._entered.communicate()
            raise
        return self._entered.returncode, output.decode(errors="replace")

    def send_signal(self, signum: int) -> None:
        """Send it a signal, if it still runs."""
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


class Machine:
    """A machine, by its number. `Lab.machines` has them.

    Args:
        directory: of the lab.
        switch: the process that joins the machines.
        index: its number, from 0 on.

    Attributes:
        name: `m0`, `m1`, …: its host name, unless it was booted with another one.

    Examples:
        >>> from footplate.lab import Lab
        >>> with Lab(1) as lab:
        ...     (machine,) = lab.machines
        ...     machine.crash()
        ...     machine.boot()
        ...     machine.run(["hostname"])
        (0, 'm0\\n')
    """

    def __init__(self, directory: Path, switch: int, index: int) -> None:
        self.name = f"m{index}"
        self._index = index
        self._lab = directory
        self._switch = switch
        self._directory = directory / self.name
        # Its interface has this hardware address, whichever its address is.
        self._mac = bytes((0x02, 0, 0, 0, index >> 8, index & 0xFF))

    @property
    def address(self) -> str:
        """Its IPv4 address, or the one that it had last."""
        return (self._directory / "address").read_text()

    @property
    def home(self) -> Path:
        """Its home directory, as this machine sees it. The machine sees `/home/lab`."""
        return self._directory / HOME.lstrip("/")

    @property
    def pid(self) -> int | None:
        """Its first process, as this machine counts; None if the machine is down."""
        try:
            pid = int((self._directory / "pid").read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        # Another process may have got its number.
        return pid if _FIRST_PROCESS.encode() in words else None

    def boot(
        self,
        address: str | None = None,
        hosts: str | None = None,
        hostname: str | None = None,
        stranger: str | None = None,
        second: str | None = None,
    ) -> None:
        """Start the machine, with a new boot id. Its files are there from before; memory, such as /dev/shm, isn't.

        Args:
            address: its IPv4 address in 10.77.0.0/24; by default the one that it had, at first 10.77.0.10 and so on.
            hosts: the content of its /etc/hosts; by default it knows all machines by name.
            hostname: its host name.
            stranger: the address of an interface which comes first and leads nowhere: 10.99.0.5/24.
            second: the address of an interface to a second network of the lab: 10.78.0.10/24. Its name is eth1.

        Raises:
            ConfigError: an address isn't one of these networks.
            LaunchError: it is up already, or this system can't make it.
        """
        _check_address("address", address, NETWORK)
        _check_address("second", second and second.partition("/")[0], SECOND_NETWORK)
        if self.pid is not None:
            raise LaunchError(f"{self.name} is up already.")
        self._write_files(address, hosts, hostname)
        orders = {
            "directory": str(self._directory), "shared": str(self._lab / SHARED), "hostname": hostname or self.name,
            "addresses": [f"{self.address}/24", *filter(None, [second])], "stranger": stranger, "needed": _needed(),
        }  # fmt: skip
        clock_s = CLOCK_STEP_S * (self._index + 1)
        entered = subprocess.Popen(
            [
                *namespaces.enter(self._switch, "pid"),
                *namespaces.make(*OWN_NAMESPACES, clock_s=clock_s),
                sys.executable, "-m", _FIRST_PROCESS,
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=command_environment({}),
        )  # fmt: skip
        assert entered.stdin is not None
        assert entered.stdout is not None
        assert entered.stderr is not None
        with entered.stdin, entered.stdout, entered.stderr:
            # nsenter, unshare, and the machine's first process.
            pid = namespaces.only_child(entered, 2)
            (self._directory / "pid").write_text(str(pid))
            for network in range(len(orders["addresses"])):
                self._plug(pid, network)
            entered.stdin.write(json.dumps(orders).encode() + b"\n")
            entered.stdin.flush()
            if entered.stdout.readline() != b"ready\n":
                why = entered.stderr.read().decode().strip()
                raise LaunchError(f"{self.name} can't be started: {why}")

    def start(
        self,
        words: Sequence[object],
        env: Mapping[str, str] | None = None,
        directory: str = HOME,
        output: int | IO[Any] | None = None,
    ) -> Command:
        """Start a command on the machine. It runs when this returns, or has ended already.

        Args:
            words: the program and its arguments.
            env: variables, over the few of this process that are passed on (`PASSED_ON`).
            directory: its working directory, as the machine sees it.
            output: where standard output and error go: a file, `subprocess.PIPE`; None for those of this process.

        Raises:
            LaunchError: the machine is down.
        """
        pid = self._up()
        entered = subprocess.Popen(
            [*namespaces.enter(pid, *OWN_NAMESPACES, "time", directory=directory), *map(str, words)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT if output is not None else None,
            env=command_environment(env or {}), start_new_session=True,
        )  # fmt: skip
        namespaces.wait_for_command(entered)
        return Command(entered)

    def run(self, words: Sequence[object], timeout_s: float | None = None, **options: Any) -> tuple[int, str]:
        """Run a command on the machine; return its exit code and its output. `options` are those of `start`.

        Raises:
            subprocess.TimeoutExpired: it didn't end in time. It is killed.
        """
        command = self.start(words, output=subprocess.PIPE, **options)
        return command.communicate(timeout_s)

    def processes(self) -> list[str]:
        """The command lines of its processes, but for the first one."""
        lines = self.run(["ps", "-eo", "pid,args"])[1].splitlines()[1:]
        return [line.strip() for line in lines if " ps -eo" not in line and line.split()[0] != "1"]

    def kill(self) -> None:
        """Kill all its processes at once. Its kernel still closes their connections."""
        pid = self.pid
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + DOWN_S
        # It is there until all processes of its namespace have ended, and so have closed their connections.
        while Path(f"/proc/{pid}").exists():
            if time.monotonic() > until:
                raise LaunchError(f"{self.name} doesn't go down.")
            time.sleep(0.005)
        self._unplug()

    def crash(self) -> None:
        """Take its power away. No other machine is notified, so its connections stay half-open there."""
        if self.pid is not None:
            self._unplug()
            self.kill()

    def _up(self) -> int:
        pid = self.pid
        if pid is None:
            raise LaunchError(f"{self.name} is down.")
        return pid

    def _write_files(self, address: str | None, hosts: str | None, hostname: str | None) -> None:
        own = self._directory
        for name in (HOME.lstrip("/"), "tmp", "mnt", "etc"):
            (own / name).mkdir(parents=True, exist_ok=True)
        (own / "tmp").chmod(0o1777)
        if address is not None or not (own / "address").exists():
            (own / "address").write_text(address or first_address(self._index))
        (own / "boot_id").write_text(f"{uuid.uuid4()}\n")
        known = "".join(f"{first_address(index)} m{index}\n" for index in range(100))
        (own / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{known}" if hosts is None else hosts)
        (own / "etc" / "hostname").write_text(f"{hostname or self.name}\n")
        (own / "etc" / "resolv.conf").write_text("")

    def _plug(self, pid: int, network: int) -> None:
        """Make the wire between the machine and a network of the switch."""
        interface, mac = interface_of(self.name, network), bytes((*self._mac[:3], network, *self._mac[4:]))
        peer = ("peer", "name", f"eth{network}", "address", mac.hex(":"), "netns", pid)
        self._ip("link", "add", interface, "type", "veth", *peer)
        self._ip("link", "set", interface, "mtu", 65_000, "promisc", "on", "up")
        ask(self._lab, {"do": "plug", "machine": self.name, "network": network, "mac": mac.hex()})

    def _unplug(self) -> None:
        ask(self._lab, {"do": "unplug", "machine": self.name})
        for network in range(NETWORKS):
            with contextlib.suppress(LaunchError):
                self._ip("link", "delete", interface_of(self.name, network))

    def _ip(self, *words: object) -> None:
        done = subprocess.run(
            [*namespaces.enter(self._switch, "net"), namespaces.program("ip"), *map(str, words)],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise LaunchError(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")


def first_address(index: int) -> str:
    """The address of a machine, unless it was booted with another one.

    >>> first_address(0), first_address(3)
    ('10.77.0.10', '10.77.0.13')
    """
    return str(NETWORK[10 + index])


def _check_address(name: str, address: str | None, network: ipaddress.IPv4Network) -> None:
    hosts = range(1, network.num_addresses - 1)
    if address is not None and address not in {str(network[number]) for number in hosts}:
        raise ConfigError(f"{name}={address}: expected an address from {network[1]} to {network[-2]}.")


def ask(directory: Path, request: dict[str, Any]) -> None:
    """Send a request to the switch of the lab in `directory`; see `switch.py`.

    Raises:
        LaunchError: the switch refuses it, or there is none.
    """
    # The path of a socket has room for 107 characters only.
    fd = os.open(directory, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/proc/self/fd/{fd}/{SOCKET}")
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline() or b'{"error": "it has ended"}')
    except OSError as error:
        raise LaunchError(f"The lab in {directory} doesn't run: {error}.") from error
    finally:
        os.close(fd)
    if "error" in answer:
        raise LaunchError(f"The lab's switch refuses {request}: {answer['error']}.")


def _needed() -> list[str]:
    """The directories that Python needs, the shortest ones."""
    directories = {
        Path(path).resolve() for path in (sys.prefix, sys.base_prefix, *sys.path) if path and Path(path).is_dir()
    }
    return sorted(str(path) for path in directories if not any(parent in directories for parent in path.parents))


def command_environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a command on a machine: those given, over the few of this process that are passed on."""
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    path = os.pathsep.join([str(Path(sys.executable).parent), namespaces.PATH])
    return {**passed_on, "PATH": path, "HOME": HOME, "PYTHONUNBUFFERED": "1", **given}

"""Machines of the tests' Vertex AI: each replica of a CustomJob is a process of this machine.

Each process starts like its container, with the command of the request. The image's part is done here:

    pythonPackageSpec    one of Google's images: the packages are put where Python finds them,
                         `python -m MODULE ARGUMENTS`
    containerSpec        an image of the user: COMMAND ARGUMENTS; `/gcs/BUCKET/…` is a copy of the object, and packages
                         that pip installs are put beside it

Both have `CLUSTER_SPEC`, the variables of the request, and those of these tests, which replace the service account: they
have the address of the bucket. No process outlives the tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pyarrow.fs import GcsFileSystem

from footplate.launch.process_lifetime import die_with
from footplate.launch.rendezvous import HOST, free_addresses

PIP = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class Replicas:
    """The replicas of a CustomJob, each in a process group of its own.

    Args:
        pools: its `workerPoolSpecs`.
        storage: host and port of Cloud Storage.
        directory: their disk.
        say: called with each line of output: the task, and the line.
    """

    def __init__(
        self, pools: list[dict[str, Any]], storage: str, directory: Path, say: Callable[[str, str], None]
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._say = say
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._pools = pools

    def start(self) -> None:
        """Start the replicas."""
        pools = self._pools
        counts = [int(pool.get("replicaCount", 0)) for pool in pools]
        addresses = iter(free_addresses(HOST, sum(counts)))
        cluster = {f"workerpool{at}": [next(addresses) for _ in range(n)] for at, n in enumerate(counts) if n}
        for at, pool in enumerate(pools):
            for number in range(counts[at]):
                task = {"type": f"workerpool{at}", "index": number}
                self._start(pool, {"cluster": cluster, "environment": "cloud", "task": task})

    def ended(self) -> dict[str, int]:
        """Exit codes of the replicas that have ended. A signal's number is negative."""
        codes = {task: process.poll() for task, process in self._processes.items()}
        return {task: code for task, code in codes.items() if code is not None}

    @property
    def all_ended(self) -> bool:
        """Return True if all replicas have ended."""
        return len(self.ended()) == len(self._processes)

    def ask(self) -> None:
        """Send SIGTERM to all replicas."""
        for process in self._processes.values():
            process.terminate()

    def kill(self) -> None:
        """Switch off the machines. Return when all processes are gone and their output has been passed to `say`."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for reader in self._readers:
            reader.join(60)

    def _start(self, pool: dict[str, Any], described: dict[str, Any]) -> None:
        task = f"{described['task']['type']}-{described['task']['index']}"
        disk = self._directory / task
        disk.mkdir()
        spec = pool.get("pythonPackageSpec") or pool["containerSpec"]
        if "pythonModule" in spec:
            path = [self._unpacked(uri, disk) for uri in spec["packageUris"]]
            words = ["python", "-m", spec["pythonModule"], *spec.get("args", [])]
        else:
            path = [str(disk / "installed")]
            words = [self._mounted(word, disk) for word in (*spec["command"], *spec.get("args", []))]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FOOTPLATE_")}
        environ = {
            **kept,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH")])),
            "CLUSTER_SPEC": json.dumps(described),
            **{variable["name"]: variable["value"] for variable in spec.get("env", [])},
            **PIP,
            "PIP_TARGET": path[0],
        }
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, env=environ,
            cwd=disk, start_new_session=True, preexec_fn=partial(die_with, os.getpid()),
        )  # fmt: skip
        self._processes[task] = process
        reader = threading.Thread(target=self._relay, args=(task, process))
        self._readers.append(reader)
        reader.start()

    def _unpacked(self, uri: str, disk: Path) -> str:
        """The directory of an unpacked source distribution from the bucket."""
        with tarfile.open(self._fetched(uri.removeprefix("gs://"), disk)) as tar:
            # Python 3.11.2, which Debian 12 has, has no filters.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(disk)
        return str(disk / Path(uri).name.removesuffix(".tar.gz"))

    def _mounted(self, word: str, disk: Path) -> str:
        """A word of a command; a path below the mounted bucket becomes a path of this machine."""
        return str(self._fetched(word.removeprefix("/gcs/"), disk)) if word.startswith("/gcs/") else word

    def _fetched(self, name: str, disk: Path) -> Path:
        """A local copy of an object."""
        files = GcsFileSystem(anonymous=True, scheme="http", endpoint_override=self._storage)
        copy = disk / "gcs" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with files.open_input_file(name) as file:
            copy.write_bytes(file.read())
        return copy

    def _relay(self, task: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._say(task, line.removesuffix("\n"))

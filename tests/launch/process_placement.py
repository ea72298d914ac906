"""A placement without an engine: agents in processes of this machine, which stand for machines of a cluster."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.placement import Lost


def rank() -> int:
    """In a worker, which it is."""
    return int(os.environ["RANK"])


def agent() -> int:
    """In a worker, the process id of the agent that looks after it."""
    import psutil

    return psutil.Process().parent().ppid()


_RUN = "import pickle, sys; call, index, node = pickle.load(sys.stdin.buffer); call(index, node)"


@dataclass
class ProcessPlacement:
    """`nodes`: the node of each place; `env`: its variables; `program`: what it runs. `started`: all calls of `start`."""

    nodes: Sequence[str]
    env: Sequence[dict[str, str]] = ()
    program: str = _RUN
    name: str = "places"
    host: str = "127.0.0.1"
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    started: list[AgentCall] = field(default_factory=list)

    def slots(self) -> int:
        return len(self.nodes)

    def start(self, count: int, call: AgentCall) -> None:
        self.started.append(call)
        for index in range(count):
            extra = self.env[index] if self.env else {}
            process = subprocess.Popen(
                [sys.executable, "-c", self.program], stdin=subprocess.PIPE, env={**os.environ, **extra}
            )
            assert process.stdin is not None
            process.stdin.write(pickle.dumps((call, index, self.nodes[index])))
            process.stdin.close()
            self.processes[index] = process

    def lost(self) -> list[Lost]:
        gone = [index for index, process in self.processes.items() if process.poll() is not None]
        return [Lost(index, f"its process ended with {self.processes.pop(index).returncode}") for index in gone]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes = {}

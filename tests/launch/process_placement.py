"""A placement without an engine: each agent is a process of this machine, in place of a machine of a cluster."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import template

from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.placement import CountedSlots, Lost


def rank() -> int:
    """The rank of the calling worker."""
    return int(os.environ["RANK"])


def agent() -> int:
    """The process id of the agent of the calling worker."""
    import psutil

    return psutil.Process().parent().ppid()


_RUN = "import pickle, sys; call, index, node = pickle.load(sys.stdin.buffer); call(index, node)"


@dataclass
class ProcessPlacement(CountedSlots):
    """Starts an agent in a process for each node.

    Attributes:
        nodes: the node of each agent.
        env: the variables of each agent.
        program: the program of an agent.
        fresh: agents are fresh interpreters, not forks (`template.py`).
        processes: the running agents, by index.
        started: all calls of `start`.
    """

    nodes: Sequence[str]
    env: Sequence[dict[str, str]] = ()
    program: str = _RUN
    fresh: bool = False
    name: str = "processes"
    host: str = "127.0.0.1"
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    started: list[AgentCall] = field(default_factory=list)

    def slots(self, wanted: int = 0) -> int:
        return len(self.nodes)

    def start(self, slots: Sequence[int], call: AgentCall) -> None:
        self.started.append(call)
        popen = subprocess.Popen if self.fresh else template.Popen
        for index in range(len(slots)):
            extra = self.env[index] if self.env else {}
            process = popen([sys.executable, "-c", self.program], stdin=subprocess.PIPE, env={**os.environ, **extra})
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

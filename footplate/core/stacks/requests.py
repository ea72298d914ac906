"""Requests to processes of this machine, over the pipe on which they answer for their stacks (`answering.py`).

    processes = answering_processes([pid])                      the process and those below it, ranks in order
    send(processes[0], "profile", {"steps": 10}, limit_s=5.0)   the reply of the function in `answering.handlers`

Only processes of the same user can be asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footplate.core.stacks import answering, proc

POLL_S = 0.005


class NoAnswer(Exception):
    """The process has ended, or it didn't answer in time."""


@dataclass(frozen=True)
class Answering:
    """A process that answers.

    Attributes:
        pid: its id.
        rank: its rank; None if it is none.
        file: the path of the file with its latest answer.
        pipe: the path of the pipe for questions.
    """

    pid: int
    rank: int | None
    file: str
    pipe: str


def answering_processes(pids: Iterable[int]) -> list[Answering]:
    """Return the processes that answer, among these and those below them: ranks first, in their order."""
    if sys.platform != "linux":
        return []
    children = proc.children()
    found = [answering_process for pid in pids for answering_process in _of_tree(pid, children)]
    unique = {process.pid: process for process in found}
    return sorted(unique.values(), key=lambda process: (process.rank is None, process.rank, process.pid))


def _of_tree(pid: int, children: Mapping[int, list[int]]) -> Iterator[Answering]:
    process = _answering(pid)
    if process is not None:
        yield process
    for child in children.get(pid, []):
        yield from _of_tree(child, children)


def _answering(pid: int) -> Answering | None:
    for name, path in proc.descriptors(pid, (answering.ANSWER,)).items():
        pipe, *rank = name.removeprefix(answering.ANSWER).split("-")
        return Answering(pid, int(rank[0]) if rank else None, path, f"/proc/{pid}/fd/{pipe}")
    return None


def send(process: Answering, name: str, arguments: Mapping[str, Any], limit_s: float) -> dict[str, Any] | None:
    """Send a request, and return its reply. None if the process has no handler of this name.

    Args:
        process: the process.
        name: the handler.
        arguments: plain values. The whole request has at most 4,096 bytes.
        limit_s: the longest wait, in seconds.

    Raises:
        NoAnswer: the process has ended, or it doesn't answer: it is stopped, or its C code keeps the GIL.
    """
    identity = uuid.uuid4().hex[:12]
    line = json.dumps({"id": identity, "name": name, "arguments": dict(arguments)}).encode() + b"\n"
    until = time.monotonic() + limit_s
    try:
        with Path(process.file).open("rb", buffering=0) as answers:
            pipe = os.open(process.pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, line)
            finally:
                os.close(pipe)
            while time.monotonic() < until:
                # An answer that is being written isn't whole.
                with contextlib.suppress(ValueError):
                    replies = json.loads(os.pread(answers.fileno(), 1 << 24, 0)).get("replies", {})
                    if identity in replies:
                        return replies[identity]
                if (proc.state_of(process.pid) or ("ended",))[0] == "ended":
                    break
                time.sleep(POLL_S)
    except OSError:
        raise NoAnswer(f"process {process.pid} has ended") from None
    if (proc.state_of(process.pid) or ("ended",))[0] == "ended":
        raise NoAnswer(f"process {process.pid} has ended")
    raise NoAnswer(f"process {process.pid} did not answer in {limit_s:g} s. See: footplate stacks {process.pid}")

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
from typing import Any

from footplate.core.stacks import answering, proc

POLL_S = 0.005


class NoAnswer(Exception):
    """The process has ended, trains no more, or didn't answer in time."""


@dataclass(frozen=True)
class Answering:
    """A process that answers.

    Attributes:
        pid: its id.
        name: the name of the file with its latest answer (`answering.py`).
    """

    pid: int
    name: str

    @property
    def rank(self) -> int | None:
        """Its rank; None if it is none."""
        return answering.Name.parse(self.name).rank


def answering_processes(pids: Iterable[int]) -> list[Answering]:
    """Return the processes that answer, among these and those below them: ranks first, in their order."""
    if sys.platform != "linux":
        return []
    children = proc.children()
    processes = [answering_process for pid in pids for answering_process in _of_tree(pid, children)]
    unique = {process.pid: process for process in processes}
    return sorted(unique.values(), key=lambda process: (process.rank is None, process.rank, process.pid))


def _of_tree(pid: int, children: Mapping[int, list[int]]) -> Iterator[Answering]:
    for name in proc.descriptors(pid, (answering.ANSWER,)):
        yield Answering(pid, name)
    for child in children.get(pid, []):
        yield from _of_tree(child, children)


@contextlib.contextmanager
def connected(process: Answering) -> Iterator[tuple[int, int]]:
    """Open the file with a process's latest answer, and its pipe for questions: two descriptors.

    Raises:
        FileNotFoundError: the process has ended, or answers no more.
        OSError: they may not be opened.
    """
    name = answering.Name.parse(process.name)
    with contextlib.ExitStack() as opened:
        answers = proc.open_memory_file(process.pid, process.name, os.O_RDONLY)
        opened.callback(os.close, answers)
        pipe = proc.open_pipe(process.pid, name.pipe, name.inode)
        opened.callback(os.close, pipe)
        yield answers, pipe


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
        with connected(process) as (answers, pipe):
            os.write(pipe, line)
            while time.monotonic() < until:
                # An answer that is being written isn't whole.
                with contextlib.suppress(ValueError):
                    replies = json.loads(os.pread(answers, 1 << 24, 0)).get("replies", {})
                    if identity in replies:
                        return replies[identity]
                if _has_ended(process.pid):
                    break
                time.sleep(POLL_S)
    except FileNotFoundError:
        reason = "has ended" if _has_ended(process.pid) else "trains no more"
        raise NoAnswer(f"process {process.pid} {reason}") from None
    except OSError as error:
        raise NoAnswer(f"process {process.pid} can't be asked: {error}") from None
    if _has_ended(process.pid):
        raise NoAnswer(f"process {process.pid} has ended")
    raise NoAnswer(f"process {process.pid} did not answer in {limit_s:g} s. See: footplate stacks {process.pid}")


def _has_ended(pid: int) -> bool:
    state = proc.state_of(pid)
    return state is None or state[0] == "ended"

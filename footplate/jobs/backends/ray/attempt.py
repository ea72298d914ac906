"""An attempt that is under way on a Ray cluster, as its supervisor sees it.

A Ray Job, known by the attempt's key, whose driver (`driver.py`) says in its output all that is to be known. From that the
logs are written, and how processes end is learnt. The output is always heard from its beginning, so that a supervisor that
takes up the attempt of another learns the same; of what is in the log files already, nothing is written again.

`ray.txt` in the attempt's folder is written before the job is submitted, and changed after it. So a supervisor knows,
without asking anybody, whether there is an attempt to take up; and one that was submitted and isn't known to the cluster
is lost.
"""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from footplate.jobs.backends.ray import log_protocol
from footplate.jobs.backends.ray.client import Info
from footplate.jobs.backends.ray.listener import Anew, Listener, NotTaken, Output, Over, Unknown
from footplate.jobs.record import Process
from footplate.jobs.supervision.logfiles import Writer
from footplate.launch.failure import Failure

MARK = "ray.txt"
SUBMITTED = "submitted"
STRAY = "driver"  # the file of what Ray itself writes into the driver's output
UNREACHED_S = 60.0  # after the grace, that a cluster which doesn't answer has to end a job


class RayAttempt:
    """See the module's docstring.

    Args:
        address: of the cluster's Jobs API.
        key: of the attempt.
        number: which attempt it is.
        folder: the attempt's.
        count: how many replicas it has.
        arguments: makes those of its submission.
        submitted: is called once the cluster has it.
        begun: whether all replicas have begun, as is known from before.
    """

    def __init__(
        self,
        address: str,
        key: str,
        number: int,
        folder: Path,
        count: int,
        arguments: Callable[[], Mapping[str, Any]],
        submitted: Callable[[], None],
        begun: bool,
    ) -> None:
        self.over = False
        self.succeeded = False
        self.failure: Failure | None = None
        self._address = address
        self._key = key
        self._number = number
        self._folder = folder
        self._count = count
        self._begun = begun
        self._waits_for = ""
        self._processes: dict[tuple[str, int], Process] = {}
        self._ended: list[Process] = []
        self._logs: dict[str, _Log] = {}
        self._rest = ""
        self._verdict: dict[str, Any] | None = None
        self._give_up_at = float("inf")
        there = _read(folder) == SUBMITTED
        if not there:
            _write(folder, "submitting")

        def note() -> None:
            if not there:
                _write(folder, SUBMITTED)
            submitted()

        self._listener = Listener(address, key, None if there else arguments, note)

    @staticmethod
    def is_there(folder: Path) -> bool:
        """Whether the attempt of a folder was begun."""
        return (folder / MARK).exists()

    @property
    def running(self) -> bool:
        """Whether all replicas have begun."""
        return self._begun or len(self._processes) == self._count

    @property
    def waits_for(self) -> str:
        """What for, while they have not."""
        trouble = self._listener.trouble
        return f"waits for the Ray cluster at {self._address}: {trouble}" if trouble else self._waits_for

    @property
    def processes(self) -> list[Process]:
        """Those that have begun."""
        return list(self._processes.values())

    def wait(self, timeout_s: float) -> list[Process]:
        """Hear it for so long; returns the processes that have ended since."""
        until = time.monotonic() + timeout_s
        while not self.over and not self._ended:
            try:
                self._take(self._listener.heard.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                break
        if not self.over and time.monotonic() > self._give_up_at:
            self.over = True
            self.failure = _lost(
                f"the Ray cluster at {self._address} couldn't be told to end it, where it may go on: "
                f"ray job stop {self._key}"
            )
        ended, self._ended = self._ended, []
        return ended

    def stop(self, grace_s: float) -> None:
        """Ask all of its processes to end; what is left after the grace, the driver kills."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace_s + UNREACHED_S)
        self._listener.stop()

    def close(self) -> None:
        """Let it be."""
        self._listener.close()
        for one in self._logs.values():
            one.close()

    def _take(self, heard: object) -> None:
        match heard:
            case Anew():
                self._rest = ""
                for one in self._logs.values():
                    one.begin_anew()
            case Output(text):
                *whole, self._rest = (self._rest + text).split("\n")
                for line in whole:
                    self._line(line)
            case Over(info):
                self._finish(info)
            case Unknown():
                self._finish(None)
            case NotTaken(text):
                self.over = True
                self.failure = Failure("exception", text, time.monotonic(), mistake=True)

    def _line(self, line: str) -> None:
        source, data = log_protocol.decode(line) or (STRAY, f"{line}\n".encode())
        if source == log_protocol.OURS:
            self._event(json.loads(data))
            return
        if source not in self._logs:
            self._logs[source] = _Log(self._folder / f"{source}.log")
        self._logs[source].take(data)

    def _event(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "waits":
                self._waits_for = event["text"]
            case "placed":
                self._waits_for = ""
            case "began":
                place = (event["role"], event["index"])
                self._processes.setdefault(place, Process(self._number, *place, pid=0, mark=0.0, began=event["at"]))
            case "ended":
                self._end(event["role"], event["index"], event["at"], event["outcome"])
            case "over":
                self._verdict = event

    def _end(self, role: str, index: int, at: float, outcome: str) -> None:
        known = self._processes.get((role, index))
        if known is None or not known.outcome:
            began = known.began if known else at
            process = Process(self._number, role, index, pid=0, mark=0.0, began=began, ended=at, outcome=outcome)
            self._processes[role, index] = process
            self._ended.append(process)

    def _finish(self, info: Info | None) -> None:
        """The job has ended, or is gone."""
        self.over = True
        verdict = self._verdict
        if verdict is not None:
            self.succeeded = verdict["succeeded"]
            found = verdict["failure"]
            if found is not None:
                self.failure = Failure(
                    found["kind"], found["text"], time.monotonic(), mistake=found["mistake"], code=found["code"]
                )
        elif info is None:
            self.failure = _lost("the Ray cluster doesn't know the job any more")
        elif info.status != "STOPPED":
            self.failure = _of_driver(info)
        stopped_by_us = self._give_up_at < float("inf")
        if not self.succeeded and self.failure is None and not stopped_by_us:
            self.failure = Failure("exception", "it was stopped in Ray", time.monotonic(), mistake=True)


def _read(folder: Path) -> str:
    return (folder / MARK).read_text() if (folder / MARK).exists() else ""


def _write(folder: Path, state: str) -> None:
    draft = folder / f".{MARK}"
    with draft.open("w") as file:
        file.write(state)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / MARK)


class _Log:
    """A log file, and how much of what is heard is in it already."""

    def __init__(self, path: Path) -> None:
        self._writer = Writer(path)
        self._heard = 0  # bytes

    def begin_anew(self) -> None:
        self._heard = 0

    def take(self, data: bytes) -> None:
        known = max(0, self._writer.size - self._heard)
        self._heard += len(data)
        if known < len(data):
            self._writer.write(data[known:])

    def close(self) -> None:
        self._writer.close()


def _of_driver(info: Info) -> Failure:
    """A driver that has ended without a verdict: by a mistake in it, or with its machine."""
    last = next((line for line in reversed(info.message.splitlines()) if line.strip()), "").strip()
    if info.code == 1 or info.error == "RUNTIME_ENV_SETUP_FAILURE":
        return Failure("exception", f"its driver could not run: {last}", time.monotonic())
    return _lost(f"its driver was lost: {last}")


def _lost(text: str) -> Failure:
    return Failure("host", text, time.monotonic())

"""The supervisor's view of an attempt on a Ray cluster.

The attempt is a Ray Job. Its name is the attempt's key. The output of its entry point (`entrypoint.py`) contains
everything: this module writes the logs from it, and learns how processes end. It always reads the output from the
beginning, so a supervisor that takes over an attempt learns the same. It doesn't write again what the log files already
contain.

`ray.txt` in the attempt's folder is written before the job is submitted, and changed afterwards. So a supervisor knows
without the cluster if there is an attempt to take over. An attempt that was submitted and that the cluster doesn't know is
lost.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from footplate.jobs.backends.ray import log_protocol
from footplate.jobs.backends.ray.client import Info
from footplate.jobs.backends.ray.listener import Listener, NotTaken, Output, Over, Restart, Unknown
from footplate.jobs.record import Process
from footplate.jobs.supervision.logfiles import Writer
from footplate.jobs.tuning.report_lines import FILES
from footplate.launch.failure import Failure

log = logging.getLogger(__name__)

MARK = "ray.txt"
SUBMITTED = "submitted"
# The file for Ray's own messages in the entry point's output.
STRAY = "driver"
# The size of a file for reports of a trial, which are one file whatever the limit of logs is.
ENDLESS = 2**50
# After the grace period, a cluster that doesn't answer has this time to end a job.
UNREACHED_S = 60.0


class RayAttempt:
    """An attempt on a Ray cluster. Implements `Attempt`.

    Args:
        address: the address of the cluster's Jobs API.
        key: the attempt's key.
        number: the attempt's number.
        folder: the attempt's folder.
        count: the number of replicas.
        arguments: makes the arguments of the submission.
        submitted: is called when the cluster has the job.
        begun: all replicas have begun, according to the store.
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
        self._events = log_protocol.EventReader()
        self._hangs = 0  # events of hangs since the output's beginning
        self._verdict: dict[str, Any] | None = None
        self._give_up_at = float("inf")
        was_submitted = _read(folder) == SUBMITTED
        if not was_submitted:
            _write(folder, "submitting")

        def on_submitted() -> None:
            if not was_submitted:
                _write(folder, SUBMITTED)
            submitted()

        self._listener = Listener(address, key, None if was_submitted else arguments, on_submitted)

    @staticmethod
    def is_there(folder: Path) -> bool:
        """Return True if the attempt of a folder was begun."""
        return (folder / MARK).exists()

    @property
    def running(self) -> bool:
        """True when all replicas have begun."""
        return self._begun or len(self._processes) == self._count

    @property
    def waits_for(self) -> str:
        """The reason why the replicas haven't begun."""
        trouble = self._listener.trouble
        return f"waits for the Ray cluster at {self._address}: {trouble}" if trouble else self._waits_for

    @property
    def processes(self) -> list[Process]:
        """The processes that have begun."""
        return list(self._processes.values())

    def wait(self, timeout_s: float) -> list[Process]:
        """Take messages for `timeout_s`, or until a process has ended. Returns the processes that have ended."""
        until = time.monotonic() + timeout_s
        while not self.over and not self._ended:
            try:
                self._take(self._listener.heard.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                break
        if not self.over and time.monotonic() > self._give_up_at:
            self.over = True
            self.failure = _lost(
                f"the Ray cluster at {self._address} can't be told to end the job, which may go on there: "
                f"ray job stop {self._key}"
            )
        ended, self._ended = self._ended, []
        return ended

    def stop(self, grace_s: float) -> None:
        """End all processes. The entry point kills the rest after the grace period."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace_s + UNREACHED_S)
        self._listener.stop()

    def close(self) -> None:
        """Stop listening. The attempt goes on."""
        self._listener.close()
        for log_file in self._logs.values():
            log_file.close()

    def _take(self, heard: object) -> None:
        match heard:
            case Restart():
                self._rest, self._hangs, self._events = "", 0, log_protocol.EventReader()
                for log_file in self._logs.values():
                    log_file.restart()
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
            if (event := self._events.take(data)) is not None:
                self._event(event)
            return
        if source not in self._logs:
            if source in FILES:
                self._logs[source] = _Log(Writer(self._folder / FILES[source], ENDLESS, most=4 * ENDLESS))
            else:
                self._logs[source] = _Log(Writer(self._folder / f"{source}.log"))
        self._logs[source].take(data)

    def _event(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "waits":
                self._waits_for = event["text"]
            case "placed":
                self._waits_for = ""
            case "began":
                replica = (event["role"], event["index"])
                self._processes.setdefault(replica, Process(self._number, *replica, pid=0, mark=0.0, began=event["at"]))
            case "hang":
                self._hangs += 1
                self._keep_hang(event["text"])
            case "ended":
                self._end(event["role"], event["index"], event["at"], event["outcome"])
            case "over":
                self._verdict = event

    def _keep_hang(self, text: str) -> None:
        """Write the stacks of a hang into the attempt's folder, unless an earlier reading of the output has done so."""
        try:
            with (self._folder / f"hang-{self._hangs}.txt").open("x") as file:
                file.write(text)
        except FileExistsError:
            pass
        except OSError as error:
            log.warning("the stacks of a hang can't be kept in %s: %s", self._folder, error.strerror)

    def _end(self, role: str, index: int, at: float, outcome: str) -> None:
        known = self._processes.get((role, index))
        if known is None or not known.outcome:
            began = known.began if known else at
            process = Process(self._number, role, index, pid=0, mark=0.0, began=began, ended=at, outcome=outcome)
            self._processes[role, index] = process
            self._ended.append(process)

    def _finish(self, info: Info | None) -> None:
        """Judge the attempt: its job has ended, or is unknown."""
        self.over = True
        verdict = self._verdict
        if verdict is not None:
            self.succeeded = verdict["succeeded"]
            failure = verdict["failure"]
            if failure is not None:
                self.failure = Failure(
                    failure["kind"], failure["text"], time.monotonic(), mistake=failure["mistake"], code=failure["code"]
                )
        elif info is None:
            self.failure = _lost("the Ray cluster no longer knows the job")
        elif info.status != "STOPPED":
            self.failure = _of_entry_point(info)
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
    """A log file, and the amount of output that was read for it."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        # Number of bytes of the log that were read.
        self._heard = 0

    def restart(self) -> None:
        self._heard = 0

    def take(self, data: bytes) -> None:
        known = max(0, self._writer.size - self._heard)
        self._heard += len(data)
        if known < len(data):
            self._writer.write(data[known:])

    def close(self) -> None:
        self._writer.close()


def _of_entry_point(info: Info) -> Failure:
    """The failure of an entry point that ended without a verdict: by an error in it, or with its machine."""
    last = next((line for line in reversed(info.message.splitlines()) if line.strip()), "").strip()
    if info.code == 1 or info.error == "RUNTIME_ENV_SETUP_FAILURE":
        return Failure("exception", f"its entry point could not run: {last}", time.monotonic())
    return _lost(f"its entry point was lost: {last}")


def _lost(text: str) -> Failure:
    return Failure("host", text, time.monotonic())

"""Faults that strike a training in a lab, and what must hold after each: used by `lab_chaos.py`.

    training.strike("cut off")   lets the fault strike, does what a person or a scheduler would do, waits for a new step
    training.finish(expected)    waits for the end, and compares the training with an undisturbed one

A `Launcher` (`lab_chaos_launchers.py`) starts the training. Everything else is the same for all launchers.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import corrupt_checkpoints
from lab_chaos_launchers import Kill, Launcher

from footplate.lab import Machine

PATIENCE_S = 120.0
ORPHANS_S = 15.0
LOOK_S = 0.02

KINDS = {
    "kill rank": "kill -9 of a rank",
    "kill machine": "all processes of a machine at once; it boots with another address",
    "lose power": "a machine loses its power; it boots with another address",
    "cut off": "a machine is cut off for good; the spare one takes its place",
    "hears nothing": "machine 0 isn't heard by a machine any more; the spare one takes its place",
    "not heard": "machine 0 doesn't hear a machine any more; the spare one takes its place",
    "lose machine 0": "the power of machine 0 is gone; the training is started again on all machines",
    "short outage": "a machine is cut off for two seconds",
    "slow link": "20 ms more each way, 5 ms of jitter, 1% of the frames lost",
}
# Faults after which the launcher announces no attempt: it stays the same, or the launcher is gone.
UNANNOUNCED = {"lose machine 0", "short outage", "slow link"}
NOTHING = re.compile("$^")


@dataclass
class Findings:
    """Defects in all trainings, and the times of all faults."""

    counts: Counter[str] = field(default_factory=Counter)
    details: list[dict[str, Any]] = field(default_factory=list)
    detection_s: dict[str, list[float]] = field(default_factory=dict)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    struck: Counter[str] = field(default_factory=Counter)

    def note(self, what: str, **details: Any) -> None:
        self.counts[what] += 1
        self.details.append({"what": what, **details})
        print(f"  {what}: {details}", flush=True)


class HungError(Exception):
    """The training didn't go on."""


class EndedError(Exception):
    """The training ended before the fault had struck, or before it was noticed."""


class Training:
    """A training in a lab, which starts when this is made."""

    def __init__(self, launcher: Launcher, findings: Findings, chance: random.Random) -> None:
        self.launcher = launcher
        self.lab = launcher.lab
        self.findings = findings
        self._chance = chance
        self._addresses = 100
        self._out = self.lab.shared / "out"
        # A machine that the spare one has replaced.
        self._replaced: Machine | None = None
        # True if the part of the victim was started again after the fault.
        self._started_again = False
        launcher.start()

    def strike(self, kind: str) -> None:
        """Let a fault strike, wait until the training goes on, and record how long it took."""
        self._await(lambda: bool(self._steps_since(0.0)), "start")
        time.sleep(self._chance.uniform(0.2, 1.0))
        number = self._chance.randrange(1, len(self.launcher.hosts))
        self._started_again = False
        try:
            self._strike(kind, number)
        except EndedError:
            if self._started_again:
                # What was started there after the end of the training waits for machine 0.
                self.launcher.hosts[number].kill()
                self.launcher.hosts[number].boot()
            raise
        self._repair_replaced()
        self.lab.heal()

    def _strike(self, kind: str, number: int) -> None:
        at, announced = time.time(), self._announcements()
        if kind in self.launcher.kills:
            self._kill_host(self.launcher.kills[kind], number)
        else:
            getattr(self, "_" + kind.replace(" ", "_"))(number)
        since = at
        if kind == "lose machine 0":
            # Its last steps may be younger than the moment before the fault.
            since = at + 1.0
        elif kind not in UNANNOUNCED:
            self._await(lambda: self._announcements() > announced, kind)
            since = time.time()
            self.findings.detection_s.setdefault(kind, []).append(since - at)
        self._await(lambda: bool(self._steps_since(since)), kind)
        self.findings.recovery_s.setdefault(kind, []).append(self._steps_since(since)[0] - at)
        self.findings.struck[kind] += 1
        print(f"  {kind}: a step after {self.findings.recovery_s[kind][-1]:.1f} s", flush=True)

    # The faults. Each gets the number of a machine.

    def _kill_rank(self, number: int) -> None:
        host = self.launcher.hosts[number]
        host.run(["kill", "-9", self._pid_of_rank(host)])

    def _kill_host(self, kill: Kill, number: int) -> None:
        host = self.launcher.hosts[number]
        host.run(["kill", "-9", ancestor(host, self._pid_of_rank(host), kill.process)])
        if kill.start_again:
            self._start_on(number)

    def _kill_machine(self, number: int) -> None:
        self.launcher.hosts[number].kill()
        self._come_back(number)

    def _lose_power(self, number: int) -> None:
        self.launcher.hosts[number].crash()
        self._come_back(number)

    def _cut_off(self, number: int) -> None:
        self.lab.cut(self.launcher.hosts[number])
        self._replace(number)

    def _hears_nothing(self, number: int) -> None:
        self.lab.partition([self.launcher.hosts[0]], [self.launcher.hosts[number]])
        self._replace(number)

    def _not_heard(self, number: int) -> None:
        self.lab.partition([self.launcher.hosts[number]], [self.launcher.hosts[0]])
        self._replace(number)

    def _lose_machine_0(self, _: int) -> None:
        first, *others = self.launcher.hosts
        first.crash()
        for host in others:
            self._no_orphans(host, PATIENCE_S, self.launcher.idle_hosts)
        # Without its head, a cluster is of no use: all of its machines start from nothing.
        for host in others:
            host.kill()
        for host in self.launcher.hosts:
            host.boot()
        self.launcher.start()

    def _short_outage(self, number: int) -> None:
        self.lab.cut(self.launcher.hosts[number])
        time.sleep(2.0)
        self.lab.heal()

    def _slow_link(self, number: int) -> None:
        self.lab.shape(self.launcher.hosts[number], delay_s=0.02, jitter_s=0.005, loss=0.01)
        time.sleep(3.0)

    # What a person or a scheduler does then

    def _start_on(self, number: int) -> None:
        self.launcher.start_on(number)
        self._started_again = True

    def _come_back(self, number: int) -> None:
        self._addresses += 1
        self.launcher.hosts[number].boot(f"10.77.0.{self._addresses}")
        self._start_on(number)

    def _replace(self, number: int) -> None:
        """Use the spare machine instead. The lost one becomes the spare one."""
        launcher = self.launcher
        self._replaced = launcher.hosts[number]
        launcher.hosts[number], launcher.spare = launcher.spare, launcher.hosts[number]
        self._start_on(number)

    def _repair_replaced(self) -> None:
        """Boot the machine that was replaced, once its ranks have ended by themselves."""
        if self._replaced is not None:
            self._no_orphans(self._replaced, PATIENCE_S, self.launcher.idle_hosts)
            self._replaced.crash()
            self._replaced.boot()
            self._replaced = None

    # The end

    def finish(self, expected: dict[str, set[str]]) -> None:
        """Wait for the end of the training, and compare it with the undisturbed one."""
        try:
            self.launcher.program.wait(4 * PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.findings.note("hung", when="the end", said=self._said())
        else:
            for host in self.launcher.hosts:
                self._no_orphans(host, ORPHANS_S)
        losses = losses_in(self._out)
        different = [key for key in expected if losses.get(key) != expected[key]]
        if different:
            self.findings.note(
                "diverged", machines=len(self.launcher.hosts), first=different[0], of=len(different), said=self._said()
            )
        for path, error in corrupt_checkpoints(self._out / "run"):
            self.findings.note("corrupt", checkpoint=path.name, error=str(error))

    def _no_orphans(self, host: Machine, within_s: float, allowed: re.Pattern[str] = NOTHING) -> None:
        """Wait until a machine has no process but those of the engine itself, and those that are allowed."""
        until = time.monotonic() + within_s
        while left := [
            line for line in host.processes() if not self.launcher.services.search(line) and not allowed.search(line)
        ]:
            if time.monotonic() > until:
                self.findings.note("orphans", machine=host.name, processes=left)
                return
            time.sleep(0.2)

    # What it says

    def _await(self, condition: Callable[[], bool], when: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > until:
                self.findings.note("hung", when=when, said=self._said())
                raise HungError
            if self.launcher.program.returncode is not None:
                raise EndedError
            time.sleep(LOOK_S)

    def _announcements(self) -> int:
        return self.launcher.log.read_text().count("; attempt ")

    def _steps_since(self, moment: float) -> list[float]:
        """The times of the steps of rank 0 after a moment."""
        return [at for at in (line["time"] for line in lines_of(self._out / "rank-0.jsonl")[-400:]) if at > moment]

    def _pid_of_rank(self, host: Machine) -> int:
        """The process of the rank on a machine, which has written the last line from there."""
        lines = [line for file in self._out.glob("rank-*.jsonl") for line in lines_of(file)[-1:]]
        return max((line for line in lines if line["machine"] == host.name), key=lambda line: line["time"])["pid"]

    def _said(self) -> str:
        return self.launcher.log.read_text()[-1500:]


def ancestor(host: Machine, pid: int, words: str) -> int:
    """The closest ancestor of a rank's process whose command line has these words.

    Raises:
        EndedError: the rank has ended.
    """
    parents: dict[int, int] = {}
    command_lines: dict[int, str] = {}
    for line in host.run(["ps", "-eo", "pid,ppid,args"])[1].splitlines()[1:]:
        child, parent, command_line = line.split(None, 2)
        parents[int(child)], command_lines[int(child)] = int(parent), command_line
    if pid not in parents:
        raise EndedError
    while words not in command_lines[pid]:
        pid = parents[pid]
        if pid not in parents:
            raise LookupError(f"{host.name} has no ancestor of a rank with {words!r}: {command_lines}")
    return pid


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a rank's journal; none if there is no file yet."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def losses_in(directory: Path) -> dict[str, set[str]]:
    """All losses that were ever computed, by rank and step."""
    found: dict[str, set[str]] = {}
    for file in directory.glob("rank-*.jsonl"):
        for line in lines_of(file):
            found.setdefault(f"{file.stem} step {line['step']}", set()).add(line["loss"])
    return found

"""Several machines whose network breaks: what happens to `footplate run`, and how long it takes to go on.

    python benchmarks/lab_chaos.py --faults 200

Each training runs on two to four machines of a lab (`footplate.lab`: namespaces with a TCP stack of their own), with one
rank on each. One more machine is spare. Faults strike the training one after the other, in random order. After a fault, the
benchmark does what a person or a scheduler does: it gives the command again on the lost machine when that is back, or on
the spare one. A fault counts if the training has gone on after it.

The figures count defects, and all of them must be 0:

- `diverged`: trainings with a loss, of any rank, step and attempt, that isn't the one of an undisturbed training;
- `corrupt`: checkpoints that claim to be complete but fail to load;
- `hung`: faults after which no step came within `PATIENCE_S`, and commands that didn't end;
- `orphans`: processes on a machine after its command has ended.

For each fault the table has the seconds until the next attempt was announced (detection), and until the first step after
it (recovery). All machines share the wall clock of this one, so the times can be compared.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import arguments_parser, machine, report

from footplate import checkpoint
from footplate.lab import Command, Lab, Machine, why_not

SCRIPT = Path(__file__).with_name("lab_train.py")
MACHINES = (2, 3, 4)
EPOCHS = 30
FAULTS_EACH = 6
HEARTBEAT_S = 5.0
PAUSE_S = 0.1
PATIENCE_S = 120.0
ORPHANS_S = 15.0
LOOK_S = 0.02

# Faults, and whether an attempt ends with each.
KINDS = {
    "kill rank": "kill -9 of a rank",
    "kill command": "kill -9 of `footplate run` on a machine; the command is given again",
    "kill machine": "all processes of a machine at once; it boots with another address",
    "lose power": "a machine loses its power; it boots with another address",
    "cut off": "a machine is cut off for good; the spare one takes its place",
    "hears nothing": "machine 0 isn't heard by a machine any more; the spare one takes its place",
    "not heard": "machine 0 doesn't hear a machine any more; the spare one takes its place",
    "lose machine 0": "the power of machine 0 is gone; all commands are given again",
    "short outage": "a machine is cut off for two seconds",
    "slow link": "20 ms more each way, 5 ms of jitter, 1% of the frames lost",
}
ENDS_NO_ATTEMPT = {"short outage", "slow link"}


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


class Training:
    """A training in a lab: one rank on each machine but the spare one."""

    def __init__(self, lab: Lab, findings: Findings, chance: random.Random) -> None:
        self.lab = lab
        self.findings = findings
        self._chance = chance
        self._hosts = lab.machines[:-1]
        self.spare = lab.machines[-1]
        self._addresses = 100
        self._out = lab.shared / "out"
        # A machine that was cut off and replaced, and its command.
        self._replaced: tuple[Machine, Command] | None = None
        shutil.copy(SCRIPT, lab.shared)
        self._commands = [self._start(node_rank) for node_rank in range(len(self._hosts))]

    def _start(self, node_rank: int) -> Command:
        world = len(self._hosts)
        with (self.lab.shared / f"node-{node_rank}.log").open("ab") as log:
            return self._hosts[node_rank].start(
                [
                    "footplate", "run", "--nnodes", world, "--node-rank", node_rank, "--np", world, "--max-restarts", 99,
                    "--max-host-restarts", 99, "--heartbeat-timeout", HEARTBEAT_S, "--master-addr",
                    self._hosts[0].address, "/mnt/lab_train.py", "/mnt/out", PAUSE_S, EPOCHS,
                ],
                env={"FOOTPLATE_TOKEN": "a-token-for-the-lab", "OMP_NUM_THREADS": "1"}, output=log,
            )  # fmt: skip

    def strike(self, kind: str) -> None:
        """Let a fault strike, wait until the training goes on, and record how long it took."""
        self._await(lambda: bool(self._steps_since(0.0)), "start")
        time.sleep(self._chance.uniform(0.2, 1.0))
        victim = self._chance.randrange(1, len(self._hosts))
        before = self._commands[victim]
        try:
            self._strike(kind, victim)
        except EndedError:
            if self._commands[victim] is not before:
                # It was given after the end, and waits for machine 0.
                self._commands[victim].send_signal(9)
            raise
        self._await_replaced()
        self.lab.heal()

    def _strike(self, kind: str, victim: int) -> None:
        at, announced = time.time(), self._announcements()
        getattr(self, "_" + kind.replace(" ", "_"))(victim)
        since = at
        if kind == "lose machine 0":
            # Its last steps may be younger than the moment before the fault.
            since = at + 1.0
        elif kind not in ENDS_NO_ATTEMPT:
            self._await(lambda: self._announcements() > announced, kind)
            since = time.time()
            self.findings.detection_s.setdefault(kind, []).append(since - at)
        self._await(lambda: bool(self._steps_since(since)), kind)
        self.findings.recovery_s.setdefault(kind, []).append(self._steps_since(since)[0] - at)
        self.findings.struck[kind] += 1

    # The faults

    def _kill_rank(self, victim: int) -> None:
        last_line = (self._out / f"rank-{victim}.jsonl").read_text().splitlines()[-1]
        self._hosts[victim].run(["kill", "-9", json.loads(last_line)["pid"]])

    def _kill_command(self, victim: int) -> None:
        self._commands[victim].send_signal(9)
        self._commands[victim].wait(PATIENCE_S)
        self._commands[victim] = self._start(victim)

    def _kill_machine(self, victim: int) -> None:
        self._hosts[victim].kill()
        self._come_back(victim)

    def _lose_power(self, victim: int) -> None:
        self._hosts[victim].crash()
        self._come_back(victim)

    def _come_back(self, victim: int) -> None:
        self._addresses += 1
        self._hosts[victim].boot(f"10.77.0.{self._addresses}")
        self._commands[victim] = self._start(victim)

    def _cut_off(self, victim: int) -> None:
        self.lab.cut(self._hosts[victim])
        self._replace(victim)

    def _hears_nothing(self, victim: int) -> None:
        self.lab.partition([self._hosts[0]], [self._hosts[victim]])
        self._replace(victim)

    def _not_heard(self, victim: int) -> None:
        self.lab.partition([self._hosts[victim]], [self._hosts[0]])
        self._replace(victim)

    def _replace(self, victim: int) -> None:
        """Give the command on the spare machine. The lost one becomes the spare one."""
        lost = self._hosts[victim]
        self._replaced = (lost, self._commands[victim])
        self._hosts[victim], self.spare = self.spare, lost
        self._commands[victim] = self._start(victim)

    def _await_replaced(self) -> None:
        """The command on a machine that was cut off must end by itself."""
        if self._replaced is not None:
            lost, command = self._replaced
            self._replaced = None
            if self._ended(command, "lost machine"):
                self._no_orphans(lost)

    def _lose_machine_0(self, _: int) -> None:
        self._hosts[0].crash()
        for host, command in list(zip(self._hosts, self._commands, strict=True))[1:]:
            if self._ended(command, "after machine 0"):
                self._no_orphans(host)
        self._hosts[0].boot()
        self._commands = [self._start(node_rank) for node_rank in range(len(self._hosts))]

    def _short_outage(self, victim: int) -> None:
        self.lab.cut(self._hosts[victim])
        time.sleep(2.0)
        self.lab.heal()

    def _slow_link(self, victim: int) -> None:
        self.lab.shape(self._hosts[victim], delay_s=0.02, jitter_s=0.005, loss=0.01)
        time.sleep(3.0)

    # The end

    def finish(self, expected: dict[str, set[str]]) -> None:
        """Wait for the end of the training, and compare it with the undisturbed one."""
        for host, command in zip(self._hosts, self._commands, strict=True):
            if self._ended(command, "the end", 4 * PATIENCE_S):
                self._no_orphans(host)
        losses = losses_in(self._out)
        different = [key for key in expected if losses.get(key) != expected[key]]
        if different:
            self.findings.note("diverged", machines=len(self._hosts), first=different[0], of=len(different))
        for path in (self._out / "run").rglob(f"*{checkpoint.SUFFIX}"):
            if path.is_symlink() or not checkpoint.is_complete(path):
                continue
            try:
                checkpoint.load(path)
            except Exception as error:
                self.findings.note("corrupt", checkpoint=path.name, error=str(error))

    def _ended(self, command: Command, when: str, limit_s: float = PATIENCE_S) -> bool:
        try:
            command.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.findings.note("hung", when=when, said=self._said())
            return False
        return True

    def _no_orphans(self, host: Machine) -> None:
        until = time.monotonic() + ORPHANS_S
        while left := host.processes():
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
            if self._commands[0].returncode is not None:
                raise EndedError
            time.sleep(LOOK_S)

    def _announcements(self) -> int:
        return (self.lab.shared / "node-0.log").read_text().count("; attempt ")

    def _steps_since(self, moment: float) -> list[float]:
        """The times of the steps of rank 0 after a moment."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self._out / "rank-0.jsonl").read_text().splitlines()
            return [
                at for at in (json.loads(line)["time"] for line in lines[-400:] if line.endswith("}")) if at > moment
            ]
        return []

    def _said(self) -> str:
        return (self.lab.shared / "node-0.log").read_text()[-1500:]


class HungError(Exception):
    """The training didn't go on."""


class EndedError(Exception):
    """The training ended before the fault had struck, or before it was noticed."""


def losses_in(directory: Path) -> dict[str, set[str]]:
    """All losses that were ever computed, by rank and step."""
    found: dict[str, set[str]] = {}
    for file in directory.glob("rank-*.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            found.setdefault(f"{file.stem} step {entry['step']}", set()).add(entry["loss"])
    return found


def undisturbed(world: int) -> dict[str, set[str]]:
    """The losses of a training of this many ranks on one machine."""
    with tempfile.TemporaryDirectory() as directory:
        words = [sys.executable, "-m", "footplate", "run", "--np", str(world), str(SCRIPT), directory, "0", str(EPOCHS)]
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        return losses_in(Path(directory))


def run(faults: int, seed: int) -> Findings:
    """Strike trainings until all faults have struck."""
    chance, findings = random.Random(seed), Findings()
    # Every kind occurs equally often.
    left = list(itertools.islice(itertools.cycle(KINDS), faults))
    chance.shuffle(left)
    expected: dict[int, dict[str, set[str]]] = {}
    number = 0
    while left:
        world = MACHINES[number % len(MACHINES)]
        number += 1
        if world not in expected:
            expected[world] = undisturbed(world)
        print(f"training {number} on {world} machines, {len(left)} faults to come", flush=True)
        with Lab(world + 1) as lab:
            training = Training(lab, findings, chance)
            try:
                for _ in range(min(FAULTS_EACH, len(left))):
                    training.strike(left[0])
                    left.pop(0)
            except EndedError:
                pass
            except HungError:
                left.pop(0)
                continue
            training.finish(expected[world])
    return findings


def main() -> None:
    parser = arguments_parser("Break the network of trainings on several machines", "three faults: shows that it works")
    parser.add_argument("--faults", type=int, default=200, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    options = parser.parse_args()
    if why := why_not():
        raise SystemExit(why)
    host, begun = machine(), time.monotonic()
    findings = run(3 if options.quick else options.faults, options.seed)
    rows = []
    for kind, meaning in KINDS.items():
        row: dict[str, Any] = {"name": kind, "meaning": meaning, "faults": findings.struck[kind]}
        for name, times in (("detection", findings.detection_s), ("recovery", findings.recovery_s)):
            if values := times.get(kind):
                row |= {f"{name}_s": statistics.median(values), f"{name}_worst_s": max(values)}
        rows.append(row)
    counted = ("diverged", "corrupt", "hung", "orphans")
    all_recoveries = [value for values in findings.recovery_s.values() for value in values]
    figures = {
        "faults": findings.struck.total(),
        **{name: findings.counts[name] for name in counted},
        "heartbeat_timeout_s": HEARTBEAT_S,
        "recovery_s": statistics.median(all_recoveries),
        "recovery_worst_s": max(all_recoveries),
        "minutes": (time.monotonic() - begun) / 60,
        "seed": options.seed,
        "findings": findings.details,
    }
    columns = {
        "faults": "faults",
        "detection_s": "median s until noticed",
        "detection_worst_s": "worst",
        "recovery_s": "median s until a new step",
        "recovery_worst_s": "worst",
    }
    report(
        "lab_chaos",
        f"{figures['faults']} faults",
        columns,
        rows,
        {},
        figures,
        host,
        ("torch", "footplate"),
        options.json,
    )
    print({name: figures[name] for name in ("faults", *counted)})
    sys.exit(any(findings.counts.values()))


if __name__ == "__main__":
    main()

"""Kill a training many times, in ten ways, at random moments, and compare it with an undisturbed training.

    python benchmarks/chaos.py --kills 200 --json benchmarks/results/chaos.json

The order of events:

1. `chaos_train.py` trains for about 315 batches.
2. Up to `BLOWS_EACH` faults strike it, one after another, as drawn by `chaos_plan.plan`. After every exit, the same command
   starts it again. A seventh of the faults don't wait until the training has recovered from the fault before.
3. The next training begins with the other of two kinds of data, and with 2, 3 or 4 ranks in turn. This goes on until all
   faults have struck.

The benchmark compares each training, bit for bit, with an undisturbed run: the loss and learning rate of every batch in
every attempt on all ranks, every validation, the mean of every epoch, and the final weights. It also counts:

- `diverged`: values that differ or are missing, as the number of faults that preceded them;
- `corrupt`: checkpoints that claim to be complete but fail to load;
- `orphans`: processes that are still alive `PATIENCE_S` after the script has exited;
- `stuck`: faults after which no batch was trained for `STUCK_S`;
- `unexpected`: exits of the script that no fault explains;
- `overlapping`: batches that a process trained after its successor had begun;
- `litter`: files left beside the last checkpoint at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos_faults import CLOCK, ORDER, TAKEN
from chaos_plan import FILE_EVENTS, KINDS, Blow, Fall, Line, aftermath, judge, overlaps, plan, read, spread
from common import arguments_parser, corrupt_checkpoints, machine, report
from processes import Program

RECIPES = ("table", "workers")
WORLDS = (2, 3, 4)
BLOWS_EACH = 8
STUCK_S = 90.0
PATIENCE_S = 3.0
DISK_BYTES = 4 << 20
ANY = ("",)
# The second text appears when there is no space even for the run's directory.
FULL = ("The disk is full", "No space left on device")
_SCRIPT = str(Path(__file__).with_name("chaos_train.py"))


@dataclass
class Findings:
    """Defects found in all trainings: `counts` by name, `details` in words."""

    counts: Counter[str] = field(default_factory=Counter)
    details: list[dict[str, Any]] = field(default_factory=list)

    def note(self, what: str, count: int, **details: Any) -> None:
        """Record a defect and how many times it occurred."""
        if count:
            self.counts[what] += count
            self.details.append({"what": what, "count": count, **details})
            print(f"  {what}: {details}", flush=True)


class Training:
    """One training in a directory of its own, from its first start to its end, including all restarts.

    Args:
        directory: an empty directory.
        recipe: one of `RECIPES`.
        world: the number of ranks.
        findings: collects the defects.
    """

    def __init__(self, directory: Path, recipe: str, world: int, findings: Findings) -> None:
        self.directory = directory
        self.recipe = recipe
        self.world = world
        self.falls: list[Fall] = []
        self._findings = findings
        # Exit codes that faults explain, with the messages that belong to them.
        self._excuses: dict[int, tuple[str, ...]] = {}
        self._seen = 0
        self.program = self._start()

    def finish(self) -> None:
        """Let the training run to its end."""
        self._await(lambda: False)

    def strike(self, blow: Blow) -> bool:
        """Strike the training once, after the planned wait. Return False if it ended first."""
        if self.falls and not blow.hasty and not self._await(self._has_gone_on):
            return False
        if not self._await(lambda: bool(self._ranks()), blow.pause_s):
            return False
        fallen = _BLOWS[blow.kind](self, blow)
        if fallen:
            self._fell(blow)
        return fallen

    def lines(self) -> list[Line]:
        """All lines of the journal."""
        return read(self.directory)

    def litter(self) -> list[str]:
        """Files beside the last checkpoint and its link, once the training has ended."""
        last = self.directory / "run" / "checkpoints" / "last.ckpt"
        return [path.name for path in last.parent.iterdir() if path not in (last, last.resolve())]

    def close(self) -> None:
        """Kill all processes and remove all files."""
        self.program.kill()

    # Its processes

    def _start(self) -> Program:
        self._excuses = {}
        return Program(
            [sys.executable, _SCRIPT, str(self.directory), self.recipe, str(self.world)], self.directory / "said.txt"
        )

    def _fork_server(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.program.process.pid).children():
                if any("footplate.launch.fork_server" in part for part in child.cmdline()):
                    return child
        return None

    def _ranks(self) -> list[psutil.Process]:
        """Processes of the ranks, in the order of their starts."""
        fork_server = self._fork_server()
        with contextlib.suppress(psutil.Error):
            return sorted(fork_server.children() if fork_server else [], key=lambda process: process.pid)
        return []

    # Waiting

    def _await(self, holds: Callable[[], bool], pause_s: float = 0.0) -> bool:
        """Wait until a condition has held for a given time, and supervise the script meanwhile.

        Return False if the training has come to its end. A wait that takes too long counts as "stuck", and the script is
        killed and started again.
        """
        begun = since = time.monotonic()
        while True:
            ended = self.program.process.poll()
            if ended is not None:
                if self._has_ended(ended):
                    return False
                begun = since = time.monotonic()
            now = time.monotonic()
            if not holds():
                since = now
            elif now - since >= pause_s:
                return True
            if self._progressed():
                begun = now
            if now - begun > STUCK_S:
                self._findings.note("stuck", 1, **self._circumstances())
                self.program.kill()
                self._excuses[-signal.SIGKILL] = ANY
            time.sleep(0.02)

    def _progressed(self) -> bool:
        """Return True if the journals have grown since the last call."""
        size = sum(path.stat().st_size for path in self.directory.glob("journal-*.log"))
        grown, self._seen = size > self._seen, size
        return grown

    def _has_gone_on(self) -> bool:
        """Return True if a call that began after the last fault has trained a batch."""
        lines, fallen = self.lines(), self.falls[-1].at
        started = {line.pid: line.at for line in lines if line.what == "start" and line.at > fallen}
        return any(line.what == "batch" and line.at > started.get(line.pid, math.inf) for line in lines)

    def _has_ended(self, code: int) -> bool:
        """Check an exit of the script and what it left, and start it again unless its work is done."""
        orphans = self.program.left(PATIENCE_S)
        if orphans:
            commands = [_command(process) for process in orphans]
            self._findings.note("orphans", len(orphans), processes=commands, **self._circumstances())
            self.program.kill()
        self._check_checkpoints()
        if code == 0:
            return True
        output = self.program.said()
        if not any(message in output for message in self._excuses.get(code, ())):
            self._findings.note("unexpected", 1, exit_code=code, said=output, **self._circumstances())
        self._make_room()
        self.program = self._start()
        return False

    def _check_checkpoints(self) -> None:
        """Load every checkpoint that claims to be complete. Nothing writes at this time."""
        for _, error in corrupt_checkpoints(self.directory / "run"):
            self._findings.note("corrupt", 1, error=str(error), **self._circumstances())

    def _circumstances(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "world": self.world, "blows": [asdict(fall.blow) for fall in self.falls]}

    # Faults. Each method returns True if the fault has struck.

    def _fell(self, blow: Blow) -> None:
        self.falls.append(Fall(blow, time.monotonic()))
        print(f"  {blow.kind}{' (hasty)' if blow.hasty else ''}", flush=True)

    def _signal_rank(self, blow: Blow, number: signal.Signals) -> bool:
        ranks = self._ranks()
        return bool(ranks) and _send(ranks[blow.rank % len(ranks)], number)

    def _kill_rank(self, blow: Blow) -> bool:
        return self._signal_rank(blow, signal.SIGKILL)

    def _freeze_rank(self, blow: Blow) -> bool:
        return self._signal_rank(blow, signal.SIGSTOP)

    def _terminate_rank(self, blow: Blow) -> bool:
        self._excuses[143] = ANY
        return self._signal_rank(blow, signal.SIGTERM)

    def _kill_fork_server(self, blow: Blow) -> bool:
        fork_server = self._fork_server()
        return fork_server is not None and _send(fork_server, signal.SIGKILL)

    def _kill_supervisor(self, blow: Blow) -> bool:
        self._excuses[-signal.SIGKILL] = ANY
        return _send(psutil.Process(self.program.process.pid), signal.SIGKILL)

    def _terminate_supervisor(self, blow: Blow) -> bool:
        self._excuses |= {143: ANY, -signal.SIGTERM: ANY}  # the latter before the trainer has set its handlers
        return _send(psutil.Process(self.program.process.pid), signal.SIGTERM)

    def _kill_in_write(self, blow: Blow) -> bool:
        return self._order({"do": "kill", "byte": int(blow.where * self._checkpoint_bytes())})

    def _kill_between_writes(self, blow: Blow) -> bool:
        return self._order({"do": "kill", "event": 1 + int(blow.where * FILE_EVENTS)})

    def _fill_disk(self, blow: Blow) -> bool:
        self._excuses[1] = FULL
        if not (self.directory / "run").is_mount():
            return self._order({"do": "full", "byte": int(blow.where * self._checkpoint_bytes())})
        _fill(self.directory / "run" / "ballast", leave=int(blow.where * self._checkpoint_bytes()))
        return self._until_ended()

    def _move_clock(self, blow: Blow) -> bool:
        (self.directory / CLOCK).write_text(str(blow.jump_s))
        time.sleep(0.1)
        return self._kill_rank(blow)

    def _order(self, order: dict[str, Any]) -> bool:
        """Order rank 0 to carry out a fault, and wait until it has died."""
        taken = self.directory / TAKEN
        taken.unlink(missing_ok=True)
        before = {rank.pid for rank in self._ranks()}
        temporary = self.directory / "order.new"
        temporary.write_text(json.dumps(order))
        temporary.rename(self.directory / ORDER)

        while self.program.process.poll() is None:
            if taken.exists() and not before <= {rank.pid for rank in self._ranks()}:
                return True
            time.sleep(0.01)
        (self.directory / ORDER).unlink(missing_ok=True)
        return self.program.process.poll() != 0

    def _until_ended(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.program.process.wait(STUCK_S)
        return self.program.process.poll() not in (None, 0)

    def _make_room(self) -> None:
        (self.directory / "run" / "ballast").unlink(missing_ok=True)

    def _checkpoint_bytes(self) -> int:
        """Size of a checkpoint, or an estimate before the first one exists."""
        sizes: list[int] = []
        with contextlib.suppress(OSError):
            for path in (self.directory / "run").rglob("*.ckpt"):
                sizes.append(sum(file.stat().st_size for file in path.iterdir()))
        return max([*sizes, 10_000])


_BLOWS: dict[str, Callable[[Training, Blow], bool]] = {
    "kill rank": Training._kill_rank,
    "kill fork server": Training._kill_fork_server,
    "kill supervisor": Training._kill_supervisor,
    "terminate rank": Training._terminate_rank,
    "terminate supervisor": Training._terminate_supervisor,
    "freeze rank": Training._freeze_rank,
    "kill in write": Training._kill_in_write,
    "kill between writes": Training._kill_between_writes,
    "full disk": Training._fill_disk,
    "clock": Training._move_clock,
}


def _send(process: psutil.Process, number: signal.Signals) -> bool:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "gone"


def _fill(ballast: Path, leave: int) -> None:
    """Fill a file system until the given number of bytes is free."""
    free = os.statvfs(ballast.parent)
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        to_write = free.f_bavail * free.f_frsize - leave
        while to_write > 0:
            to_write -= file.write(b"\0" * min(to_write, 1 << 16))


@contextlib.contextmanager
def directory(disk: bool) -> Iterator[Path]:
    """A new directory. If mounting is allowed and `disk` asks for it, its `run` is a small file system."""
    with tempfile.TemporaryDirectory(prefix="fp-chaos-") as name:
        run = Path(name) / "run"
        run.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(run)]
        mounted = disk and subprocess.run(mount, capture_output=True).returncode == 0
        try:
            yield Path(name)
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(run)], check=True)


def leave_alone(recipe: str, world: int) -> tuple[list[Line], str]:
    """Run an undisturbed training. Return its journal and its result."""
    with directory(disk=False) as root:
        findings = Findings()
        training = Training(root, recipe, world, findings)
        try:
            training.finish()
        finally:
            training.close()
        if findings.counts:
            raise SystemExit(f"The untouched training failed: {findings.details}")
        return training.lines(), (root / "result.json").read_text()


def run(kills: int, seed: int) -> tuple[Findings, list[Fall], list[dict[str, Any]], int]:
    """Strike trainings until all faults have struck. Return defects, faults, consequences, and the number of trainings."""
    untouched: dict[tuple[str, int], tuple[list[Line], str]] = {}
    findings, falls, followed = Findings(), [], []
    blows = plan(kills, seed)
    trainings = 0
    while blows:
        kind = recipe, world = (RECIPES[trainings % len(RECIPES)], WORLDS[trainings % len(WORLDS)])
        trainings += 1
        if kind not in untouched:
            untouched[kind] = leave_alone(recipe, world)
        print(f"training {trainings} ({recipe}, {world} ranks), {len(blows)} blows to come", flush=True)
        with directory(disk=True) as root:
            training = Training(root, recipe, world, findings)
            try:
                while blows and len(training.falls) < BLOWS_EACH and training.strike(blows[0]):
                    blows.pop(0)
                training.finish()
            finally:
                training.close()
            compare(training, *untouched[kind], findings, seed)
            falls += training.falls
            followed += aftermath(training.lines(), training.falls)
    return findings, falls, followed, trainings


def compare(training: Training, untouched: list[Line], result: str, findings: Findings, seed: int) -> None:
    """Record where a training with faults differs from the undisturbed one."""
    lines = training.lines()
    faults = judge(lines, untouched)
    struck_result = (training.directory / "result.json").read_text()
    if struck_result != result:
        faults.append(f"the result is {struck_result}, not {result}")
    falls = [{"kind": fall.blow.kind, "at": fall.at} for fall in training.falls]
    if faults:
        findings.note(
            "diverged",
            1,
            seed=seed,
            recipe=training.recipe,
            world=training.world,
            falls=falls,
            faults=faults[:20],
            of=len(faults),
        )
    findings.note("overlapping", overlaps(lines), seed=seed, falls=falls)
    litter = training.litter()
    findings.note("litter", len(litter), seed=seed, falls=falls, names=litter)


def arguments() -> argparse.Namespace:
    parser = arguments_parser(
        "Kill a training again and again, and compare it with an undisturbed training",
        "each kind of fault once: shows that it works, no more",
    )
    parser.add_argument("--kills", type=int, default=200, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the plan of the faults")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    kills = len(KINDS) if options.quick else options.kills
    host = machine()
    begun = time.monotonic()
    findings, falls, followed, trainings = run(kills, options.seed)
    rows = []
    for kind, meaning in KINDS.items():
        of_kind = [consequence for consequence in followed if consequence["kind"] == kind]
        row: dict[str, Any] = {"name": kind, "meaning": meaning, "kills": sum(fall.blow.kind == kind for fall in falls)}
        if of_kind:
            row |= {"lost_batches": sum(consequence["lost_batches"] for consequence in of_kind) / len(of_kind)}
            row |= {"seconds": spread([consequence["seconds"] for consequence in of_kind])["median"]}
        rows.append(row)
    counted = ("diverged", "corrupt", "orphans", "stuck", "unexpected", "overlapping", "litter")
    figures = {
        "kills": len(falls),
        **{name: findings.counts[name] for name in counted},
        "lost_steps_mean": sum(consequence["lost_batches"] for consequence in followed) / max(1, len(falls)),
        "recovery_s": spread([consequence["seconds"] for consequence in followed]),
        "trainings": trainings,
        "seed": options.seed,
        "minutes": (time.monotonic() - begun) / 60,
        "findings": findings.details,
    }
    columns = {"kills": "kills", "lost_batches": "batches lost, mean", "seconds": "median s until a new batch"}
    report("chaos", f"{len(falls)} kills", columns, rows, {}, figures, host, ("torch", "footplate"), options.json)
    print({name: figures[name] for name in ("kills", *counted, "lost_steps_mean")})
    sys.exit(any(findings.counts.values()))


if __name__ == "__main__":
    main()

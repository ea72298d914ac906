"""After a fault on several machines, when does training go on? Footplate beside torchrun and Ray Train, on the same lab.

    python benchmarks/lab_recovery.py --rounds 3

Two machines of a lab (`footplate.lab`) have a rank each, of one script with plain DDP (`lab_recovery_train.py`). A fault
strikes. On a machine that was lost, the command is given again as soon as the machine is back. What is measured is the time
from the fault until rank 0's first step after it. Each turn has a new lab. Launchers take turns.

All have their defaults, except that they may restart as often as they like. Footplate also has a turn with a heartbeat's
timeout of 5 s instead of 30 s.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import arguments_parser, machine, report, spread
from lab_recovery_train import PAUSE_S

from footplate.lab import Command, Lab, Machine, why_not

SCRIPT = Path(__file__).with_name("lab_recovery_train.py")
ON_MACHINE = "/mnt/lab_recovery_train.py"
OUT = "/mnt/out"
STEPS_BEFORE, STEPS_AFTER = 12, 3
PATIENCE_S = 120.0
RECOVERY = "seconds from the fault to the first step after it, less is better"
VARIABLES = {"FOOTPLATE_TOKEN": "a-token-for-the-lab", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
FAULTS = {
    "kill rank": "kill -9 of rank 1",
    "kill machine": "all processes of machine 1 at once; it boots, and the command is given again",
    "lose power": "machine 1 loses its power; it boots, and the command is given again",
}


class Launcher:
    """Starts the training on the machines of a lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        shutil.copy(SCRIPT, lab.shared)

    def start(self) -> None:
        """Start the training."""
        for number in range(len(self.lab.machines)):
            self.start_on(number)

    def start_on(self, number: int) -> None:
        """Give the command on a machine."""
        raise NotImplementedError

    def command(self, host: Machine, *words: object) -> Command:
        with (self.lab.shared / f"{host.name}.log").open("ab") as log:
            return host.start(words, env=VARIABLES, output=log)


class Footplate(Launcher):
    """`footplate run`."""

    heartbeat_timeout_s = 30.0

    def start_on(self, number: int) -> None:
        self.command(
            self.lab.machines[number], "footplate", "run", "--nnodes", 2, "--node-rank", number, "--np", 2,
            "--max-restarts", 99, "--max-host-restarts", 99, "--heartbeat-timeout", self.heartbeat_timeout_s,
            "--master-addr", self.lab.machines[0].address, ON_MACHINE, OUT,
        )  # fmt: skip


class FootplateSoon(Footplate):
    """`footplate run --heartbeat-timeout 5`."""

    heartbeat_timeout_s = 5.0


class Torchrun(Launcher):
    """`torchrun`, whose agents meet at machine 0."""

    def start_on(self, number: int) -> None:
        self.command(
            self.lab.machines[number], "torchrun", "--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", 99,
            "--rdzv-backend", "c10d", "--rdzv-id", "lab", "--rdzv-endpoint", f"{self.lab.machines[0].address}:29400",
            "--local-addr", self.lab.machines[number].address, ON_MACHINE, OUT,
        )  # fmt: skip


class RayTrain(Launcher):
    """Ray Train. Machine 0 has Ray's head and the driver."""

    def start(self) -> None:
        super().start()
        self.command(self.lab.machines[0], "python", ON_MACHINE, OUT, "ray")

    def start_on(self, number: int) -> None:
        host, head = self.lab.machines[number], self.lab.machines[0]
        words: list[object] = ["ray", "start", "--node-ip-address", host.address, "--num-cpus", 1]
        words += ["--object-store-memory", 100_000_000, "--disable-usage-stats"]
        words += ["--address", f"{head.address}:6379"] if number else ["--head", "--include-dashboard", "false"]
        self.command(host, *words).wait(PATIENCE_S)


LAUNCHERS: dict[str, Callable[[Lab], Launcher]] = {
    "footplate": Footplate,
    "footplate, 5 s": FootplateSoon,
    "torchrun": Torchrun,
    "ray train": RayTrain,
}


def steps(lab: Lab) -> list[float]:
    """The times of rank 0's steps."""
    file = lab.shared / "out" / "steps.txt"
    return [float(line) for line in file.read_text().split()] if file.exists() else []


def await_steps(lab: Lab, count: int, since: float) -> float | None:
    """Wait for a number of steps after a moment; return the time of the first one. None if they don't come."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        later = [at for at in steps(lab) if at > since]
        if len(later) >= count:
            return later[0]
        time.sleep(0.05)
    return None


def strike(launcher: Launcher, fault: str) -> None:
    """Let a fault strike machine 1, and do what a person or a scheduler would do then."""
    victim = launcher.lab.machines[1]
    if fault == "kill rank":
        victim.run(["sh", "-c", f"kill -9 $(cat {OUT}/pid-1)"])
        return
    if fault == "kill machine":
        victim.kill()
    else:
        victim.crash()
    victim.boot()
    launcher.start_on(1)


def turn(name: str, fault: str) -> float | None:
    """Train, let a fault strike, and return the seconds until the first step after it. None if none came."""
    with Lab(2) as lab:
        launcher = LAUNCHERS[name](lab)
        launcher.start()
        if await_steps(lab, STEPS_BEFORE, 0.0) is None:
            raise RuntimeError(f"{name} doesn't train: {(lab.shared / 'm0.log').read_text()[-3000:]}")
        at = time.time()
        strike(launcher, fault)
        # A step that was under way when the fault struck doesn't count.
        first = await_steps(lab, STEPS_AFTER, at + 2 * PAUSE_S)
        (lab.shared / "out" / "end").touch()
        return None if first is None else first - at


def main() -> None:
    parser = arguments_parser("When training goes on after a fault on several machines", "one round of one fault")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    options = parser.parse_args()
    if why := why_not():
        raise SystemExit(why)
    host = machine()
    names, faults = (["footplate", "torchrun"], ["kill rank"]) if options.quick else (list(LAUNCHERS), list(FAULTS))
    found: dict[tuple[str, str], list[float]] = {}
    for number, fault in itertools.product(range(1 if options.quick else options.rounds), faults):
        for name in names if number % 2 == 0 else reversed(names):
            seconds = turn(name, fault)
            print(f"{fault}, {name}: {'no step' if seconds is None else f'{seconds:.1f} s'}", flush=True)
            found.setdefault((fault, name), []).append(PATIENCE_S if seconds is None else seconds)
    rows: list[dict[str, Any]] = [
        {
            "name": f"{fault}: {name}", "meaning": FAULTS[fault], "recovery_s": statistics.median(seconds),
            "recovery_worst_s": max(seconds), "gave_up": sum(each >= PATIENCE_S for each in seconds), "rounds": seconds,
        }
        for (fault, name), seconds in found.items()
    ]  # fmt: skip
    ratios = {}
    for fault, (peer, key) in itertools.product(faults, [("ray train", "ray_train"), ("torchrun", "torchrun")]):
        if (fault, peer) in found:
            pairs = zip(found[fault, "footplate"], found[fault, peer], strict=True)
            ratios[f"{fault.replace(' ', '_')}_vs_{key}"] = spread(
                [own / theirs for own, theirs in pairs], "footplate", peer, RECOVERY
            )
    columns = {"recovery_s": "seconds until the next step", "recovery_worst_s": "worst", "gave_up": "none came"}
    figures: dict[str, Any] = {"pause_s": PAUSE_S, "patience_s": PATIENCE_S}
    report(
        "lab_recovery", "After a fault on two machines", columns, rows, ratios, figures, host,
        ("torch", "footplate", "ray"), options.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""Time from the kill of a process until its training makes the next step.

    bash benchmarks/peers/recovery.sh          # the environment of Ray Train, once
    python benchmarks/recovery.py --json benchmarks/results/recovery.json

Or, with the same result, in parts: `--kills 2`, and then four times `--kills 2 --add`.

A training of 2 processes, then of 4 (`recovery_jobs.py`: the same model and checkpoints in each), runs until a random step.
Then `kill -9` strikes a random rank. The figure is the time until a rank of the next attempt has finished a step. The kill
counts as recovered if the training passes, within `PATIENCE_S`, the step at which it was killed. Every kill strikes a new
job, and the contenders take turns:

    footplate warm     the fork server of the ranks survives: a restart costs a fork
    footplate compiled the same, with `torch.compile`
    footplate cold     the fork server is killed with the rank, so it must start and import torch again
    torchrun + Lightning, torchrun + bare script: `--max-restarts`, defaults otherwise
    Ray Train          `FailureConfig(max_failures=…)`

Each round also starts two bare processes. One only runs `import torch`. The other also makes an optimizer, for which torch
imports as much again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import LESS, Figures, Ratio, Rounds, arguments_parser, interleave, machine, ratio, report
from processes import Program

WORLDS = (2, 4)
PATIENCE_S = 60.0
START_S = 240.0  # limit for a job's first steps
# The kill strikes between these steps, when checkpoints exist.
FIRST_STEP, LAST_STEP = 25, 60
OURS = ("footplate warm", "footplate compiled", "footplate cold")
CONTENDERS = (*OURS, "torchrun + Lightning", "torchrun + bare script", "Ray Train")
BARE = {
    "import torch": "import torch",
    "import torch, make an optimizer": "import torch; torch.optim.AdamW([torch.zeros(1)])",
}

_HERE = Path(__file__).parent
_JOBS = str(_HERE / "recovery_jobs.py")
_RAY = _HERE / "peers" / ".venvs" / "ray" / "bin" / "python"


@dataclass(frozen=True)
class Step:
    """A rank's report of a finished step: process, step number, and time on the monotonic clock."""

    pid: int
    rank: int
    step: int
    at: float


def command(contender: str, directory: Path, world: int) -> list[str]:
    """The command that starts a job."""
    job = {
        "footplate compiled": "compiled", "torchrun + Lightning": "lightning", "torchrun + bare script": "bare",
        "Ray Train": "ray",
    }  # fmt: skip
    arguments = [_JOBS, job.get(contender, "footplate"), str(directory), str(world)]
    if contender.startswith("torchrun"):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node", str(world), "--max-restarts", "3", *arguments]
    return [str(_RAY) if contender == "Ray Train" else sys.executable, *arguments]


def measure(contender: str, world: int, chance: random.Random) -> Figures:
    """Start a job, kill one of its ranks, and observe the recovery."""
    if contender in BARE:
        return {"world": float(world), "seconds": start_bare(BARE[contender])}
    with tempfile.TemporaryDirectory(prefix="fp-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        job = Program(command(contender, directory, world), directory / "said.txt", {"RAY_USAGE_STATS_ENABLED": "0"})
        try:
            return _strike(job, contender, directory, world, chance)
        finally:
            job.kill()


def _strike(job: Program, contender: str, directory: Path, world: int, chance: random.Random) -> Figures:
    at_step, rank = chance.randint(FIRST_STEP, LAST_STEP), chance.randrange(world)
    before = _await(
        job, directory, lambda steps: any(step.rank == rank and step.step >= at_step for step in steps), START_S
    )
    if before is None:
        print(f"{contender}, {world} ranks: the training did not begin.\n{job.said()}")
        return {"recovered": 0.0, "began": 0.0}
    old = {step.pid for step in before}
    victim = next(step.pid for step in before if step.rank == rank)
    fork_server = psutil.Process(victim).ppid() if contender == "footplate cold" else None
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    if fork_server is not None:
        os.kill(fork_server, signal.SIGKILL)
    reached = max(step.step for step in read(directory) if step.at <= killed)

    def gone_on(steps: list[Step]) -> bool:
        return any(step.pid not in old and step.step > reached for step in steps)

    after = _await(job, directory, gone_on, PATIENCE_S)
    figures = {"rank": float(rank), "killed_at_step": float(reached), "recovered": 0.0}
    if after is None:
        return figures
    again = [step for step in after if step.pid not in old]
    first = min(again, key=lambda step: step.at)
    return {**figures, "recovered": 1.0, "seconds": first.at - killed, "lost_steps": float(reached + 1 - first.step)}


def _await(job: Program, directory: Path, holds: Any, patience_s: float) -> list[Step] | None:
    """Wait for a condition on the steps, and return the steps. None if the time is over or the job has ended."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        steps = list(read(directory))
        if holds(steps):
            return steps
        if job.process.poll() is not None:
            return None
        time.sleep(0.02)
    return None


def read(directory: Path) -> Iterator[Step]:
    """All steps of all ranks and attempts so far."""
    for path in directory.glob("steps-*.log"):
        rank = int(path.stem.split("-")[1])
        for line in path.read_text().splitlines():
            pid, step, at = line.split()
            yield Step(int(pid), rank, int(step), float(at))


def start_bare(program: str) -> float:
    """Seconds from the start of a process until it has run a program."""
    begun = time.monotonic()
    command = [sys.executable, "-c", f"{program}; import time; print(time.monotonic())"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ended.stdout) - begun


def summary(contender: str, world: int, runs: list[Figures]) -> dict[str, Any]:
    """The table row of a contender."""
    seconds = [run["seconds"] for run in runs if "seconds" in run]
    row: dict[str, Any] = {"name": contender, "contender": contender}
    if contender not in BARE:
        recovered = int(sum(run["recovered"] for run in runs))
        row |= {"name": f"{contender}, {world} ranks", "world": world, "kills": len(runs), "recovered": recovered}
    if seconds:
        row |= {"seconds": statistics.median(seconds), "fastest_s": min(seconds), "slowest_s": max(seconds)}
    return {**row, "rounds": runs}


def quotients(results: dict[int, Rounds]) -> dict[str, Ratio]:
    """Ratios of Footplate's cold restart to the bare starts of the same rounds."""
    ratios: dict[str, Ratio] = {}
    measure = f"wall time from the kill, or from the start, until the first step after it, {LESS}"
    for world, rounds in results.items():
        for bare, kind in zip(BARE, ("start", "optimizer"), strict=True):
            recovered = [number for number, run in enumerate(rounds["footplate cold"]) if "seconds" in run]
            pairs = {name: [rounds[name][number] for number in recovered] for name in ("footplate cold", bare)}
            if len(recovered) > 1:
                of_world = "" if world == WORLDS[0] else f"_{world}_ranks"
                ratios[f"cold_vs_bare_{kind}{of_world}"] = ratio(pairs, "footplate cold", bare, "seconds", measure)
    return ratios


def main() -> None:
    options = arguments()
    host = machine()
    if options.peer_kills and not _RAY.exists():
        raise SystemExit("Ray Train's environment is not there: bash benchmarks/peers/recovery.sh")
    if not options.quick:  # warm up the file caches
        for program in BARE.values():
            start_bare(program)
    before = earlier(options.json) if options.add else {}
    results = {world: compare(world, options.kills, options.peer_kills, options.ours) for world in options.worlds}
    write({world: together(before.get(world, {}), rounds) for world, rounds in results.items()}, host, options.json)


def arguments() -> argparse.Namespace:
    parser = arguments_parser(
        "Time from the kill of a process until its training makes the next step",
        "one kill, and Footplate only: shows that it works, no more",
    )
    parser.add_argument("--kills", type=int, default=10, help="kills of each contender and number of ranks")
    parser.add_argument(
        "--peer-kills", type=int, help="kills of the peers, which take a minute each (default: as many)"
    )
    parser.add_argument("--add", action="store_true", help="keep the kills that the file has, to run this in parts")
    options = parser.parse_args()
    if options.add and not (options.json and options.json.exists()):
        parser.error("--add needs --json FILE, with an earlier part's figures in it")
    if options.peer_kills is None:
        options.peer_kills = options.kills
    options.worlds, options.ours = WORLDS, OURS
    if options.quick:
        options.kills, options.peer_kills, options.worlds = 1, 0, WORLDS[:1]
        options.ours = [name for name in OURS if name != "footplate compiled"]
    return options


def compare(world: int, kills: int, peer_kills: int, ours: Sequence[str]) -> Rounds:
    """Run all contenders in turns. When the peers are done, Footplate and the bare starts go on."""
    chance = random.Random()

    def turn(name: str) -> Figures:
        figures = measure(name, world, chance)
        print(f"{name}, {world} ranks: {figures}", flush=True)
        return figures

    results = interleave([*BARE, *CONTENDERS], turn, peer_kills)
    for name, runs in interleave([*BARE, *ours], turn, kills - peer_kills).items():
        results[name] += runs
    return {name: runs for name, runs in results.items() if runs}


def earlier(path: Path) -> dict[int, Rounds]:
    """Contents of a file of this benchmark, in the form that `compare` returns."""
    results: dict[int, Rounds] = {world: {} for world in WORLDS}
    for row in json.loads(path.read_text())["rows"]:
        for run in row["rounds"]:
            results[int(row.get("world") or run["world"])].setdefault(row["contender"], []).append(run)
    return results


def together(before: Rounds, after: Rounds) -> Rounds:
    """Join the rounds of two results."""
    return {name: before.get(name, []) + after.get(name, []) for name in dict.fromkeys((*before, *after))}


def write(results: dict[int, Rounds], host: dict[str, Any], path: Path | None) -> None:
    """Report the results."""
    bare = {name: [run for rounds in results.values() for run in rounds[name]] for name in BARE}
    rows = [summary(name, 0, runs) for name, runs in bare.items()]
    for world, rounds in results.items():
        rows += [summary(name, world, runs) for name, runs in rounds.items() if name not in BARE]
    ours = [row for row in rows if row["name"].startswith("footplate")]
    figures = {
        "kills": sum(row["kills"] for row in ours),
        "recovered": sum(row["recovered"] for row in ours),
        "warm_seconds": next(row.get("seconds") for row in ours if row["name"].startswith("footplate warm")),
        "patience_s": PATIENCE_S,
    }
    report(
        "recovery",
        "kill -9 of a rank → first new step, one job for each kill; and the start of a bare process",
        {
            "kills": "kills",
            "recovered": "recovered",
            "seconds": "median s",
            "fastest_s": "fastest",
            "slowest_s": "slowest",
        },
        rows,
        quotients(results),
        figures,
        host,
        ("torch", "footplate", "lightning"),
        path,
    )


if __name__ == "__main__":
    main()

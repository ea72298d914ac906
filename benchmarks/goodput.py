"""The goodput ledger against what was measured outside: real trainings, as jobs, that are killed at random steps.

    python benchmarks/goodput.py

Each job trains a tiny network (`goodput_train.py`), which writes down each of its steps. Two random events hit each job:

- `kill`: SIGKILL to the training process.
- `lose`: SIGKILL to the supervisor, with which the training process dies, too. A later reconcile pass finds that.
- `preempt`: SIGTERM to the supervisor, as when a machine shuts down: the training saves and ends.

The benchmark measures the wall time from outside, from the submission until the store has the end. The figures, each the
worst of all jobs:

- `ledger_error`: |sum of the causes − wall time| / wall time.
- `training_error`: |seconds of training − seconds of steps that count, by the program| / wall time.
- `lost_error`: |seconds lost − seconds of steps that were made again, by the program| / wall time.
- `lost_steps` and `steps_again`: steps that the ledger calls lost, and steps that the program made again. A killed process
  has not reported its last second, so the ledger estimates those steps.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import arguments_parser, machine, report

from footplate.core.goodput import Cause, Ledger
from footplate.jobs.goodput import job_ledger
from footplate.jobs.operations import Jobs
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.resolving import resolve
from footplate.jobs.states import FINAL, State
from footplate.jobs.submission import PlannedJob, submit

STEPS = 500
EVENTS = (("kill", "kill"), ("lose", "kill"), ("preempt", "kill"), ("kill", "lose"), ("preempt", "preempt"))
# The fewest and the most steps of an attempt before its event.
AFTER = (30, 150)
# Between two looks at the store.
LOOK_S = 0.01
RECONCILE_S = 1.0
PATIENCE_S = 240.0
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Step:
    """A step, as the program wrote it down."""

    attempt: int
    step: int
    began: float
    ended: float


class Workplace:
    """A directory with the program, and a home of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        package = directory / "trainer"
        package.mkdir()
        (package / "__init__.py").touch()
        shutil.copy(HERE / "goodput_train.py", package)
        os.environ["FOOTPLATE_HOME"] = str(directory / "home")
        os.chdir(directory)
        self.jobs = Jobs.from_env()

    def submit(self, name: str, steps: int) -> float:
        """Submit a job. Returns the time before that, on the monotonic clock."""
        place = self.directory / name
        place.mkdir()
        flags = {"module-name": "trainer.goodput_train", "region": "us-central1", "job-dir": str(place / "run")}
        job = resolve(draft(None, flags, (str(steps), str(place)), name))
        began = time.monotonic()
        submit(PlannedJob(job, Path("trainer")), self.jobs)
        return began

    def steps(self, name: str) -> list[Step]:
        """The steps that a job's program has written down, in order."""
        found = []
        for attempt in range(1, self.jobs.store.find(name).attempt + 1):
            file = self.directory / name / f"steps-{attempt}"
            text = file.read_text() if file.exists() else ""
            for line in text[: text.rfind("\n") + 1].splitlines():
                step, began, ended = line.split()
                found.append(Step(attempt, int(step), float(began), float(ended)))
        return found


def run_job(workplace: Workplace, name: str, events: tuple[str, ...], steps: int, rng: random.Random) -> float:
    """Run a job, and hit it with events. Returns its wall time."""
    began = workplace.submit(name, steps)
    reconciled, hit, due = time.monotonic(), 0, rng.randint(*AFTER)
    while (state := workplace.jobs.store.state(name)) not in FINAL:
        if time.monotonic() - began > PATIENCE_S:
            raise TimeoutError(f"{name} is {state} after {PATIENCE_S:g} s: see {workplace.jobs.home.job(name)}")
        if hit < len(events) and state == State.RUNNING and of_attempt(workplace, name) >= due:
            strike(workplace, name, events[hit])
            hit, due = hit + 1, rng.randint(*AFTER)
        if time.monotonic() - reconciled > RECONCILE_S:
            workplace.jobs.reconcile()
            reconciled = time.monotonic()
        time.sleep(LOOK_S)
    wall_s = time.monotonic() - began
    if (state, hit) != (State.SUCCEEDED, len(events)):
        raise RuntimeError(f"{name} is {state} after {hit} events: see {workplace.jobs.home.job(name)}")
    return wall_s


def of_attempt(workplace: Workplace, name: str) -> int:
    """The number of steps of the current attempt."""
    attempt = workplace.jobs.store.find(name).attempt
    return sum(1 for step in workplace.steps(name) if step.attempt == attempt)


def strike(workplace: Workplace, name: str, event: str) -> None:
    """Let an event hit a job."""
    job = workplace.jobs.store.find(name)
    if event == "kill":
        (process,) = [each for each in workplace.jobs.store.processes(name) if each.attempt == job.attempt]
        os.kill(process.pid, signal.SIGKILL)
    else:
        assert job.owner is not None
        os.kill(job.owner["pid"], signal.SIGTERM if event == "preempt" else signal.SIGKILL)


def compare(result: Ledger, steps: list[Step], wall_s: float) -> dict[str, Any]:
    """Compare a ledger with what was measured outside, and with what the program wrote down."""
    kept = {step.step: step for step in steps}
    again = [step for step in steps if kept[step.step] is not step]
    training_s = math.fsum(step.ended - step.began for step in kept.values())
    again_s = math.fsum(step.ended - step.began for step in again)
    seconds = result.seconds
    return {
        "wall_s": wall_s,
        "goodput": result.goodput,
        "unknown_s": seconds.get(Cause.UNKNOWN, 0.0),
        "ledger_error": abs(math.fsum(seconds.values()) - wall_s) / wall_s,
        "training_error": abs(seconds.get(Cause.TRAINING, 0.0) - training_s) / wall_s,
        "lost_error": abs(seconds.get(Cause.LOST, 0.0) - again_s) / wall_s,
        "lost_steps": result.lost_steps,
        "steps_again": len(again),
    }


def main() -> None:
    parser = arguments_parser(__doc__ or "", "one job with one kill")
    parser.add_argument("--seed", type=int, default=0, help="of the random steps")
    args = parser.parse_args()
    plans, steps = (EVENTS[:1], 200) if args.quick else (EVENTS, STEPS)
    tested, rng, rows = machine(), random.Random(args.seed), []
    # The supervisor of a job that has ended may still write its last file.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        workplace = Workplace(Path(directory).resolve())
        for number, events in enumerate(plans, start=1):
            hits = events[:1] if args.quick else events
            wall_s = run_job(workplace, f"job_{number}", hits, steps, rng)
            result = job_ledger(workplace.jobs.home, workplace.jobs.store, workplace.jobs.store.find(f"job_{number}"))
            found = compare(result, workplace.steps(f"job_{number}"), wall_s)
            rows.append({"name": f"{number}: {', '.join(hits)}", "events": len(hits), **found})
        os.chdir(HERE)

    figures: dict[str, Any] = {
        name: max(row[name] for row in rows) for name in ("ledger_error", "training_error", "lost_error")
    }
    figures |= {name: sum(row[name] for row in rows) for name in ("events", "lost_steps", "steps_again")}
    columns = {name: name.replace("_", " ") for name in rows[0] if name != "name"}
    title, packages = "Goodput ledgers of trainings that were killed", ("torch", "footplate")
    report("goodput", title, columns, rows, {}, figures, tested, packages, args.json)
    print(*(f"{name} {value:.4g}" for name, value in figures.items()), sep="\n")


if __name__ == "__main__":
    main()

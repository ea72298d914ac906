"""Device seconds until a tuning reaches a score, and time until a trial starts: Footplate beside Optuna and Ray Tune.

    python benchmarks/tune.py --json benchmarks/results/tune.json

Each tuning searches for the learning rate, width and weight decay of a small network (`tune_problem.py`), with two trials
at once on two cores, until a trial has the score `TARGET` on the validation rows. Few of the drawn hyperparameters reach
it. All contestants try the same hyperparameters in the same order (`tune_task.py`), with asynchronous successive
halving: a trial is judged after 1, 3 and 9 epochs, and the best third goes on. A round has one seed. Each contestant tunes
once in it.

    footplate   a job with hyperparameters; its trials are forks, and may be paused and go on (`tune_footplate.py`)
    optuna      two processes that run `study.optimize` on one storage, with `SuccessiveHalvingPruner` (`tune_optuna.py`)
    ray tune    `ASHAScheduler` with reused actors (`tune_ray.py`)

A *device* is one of the two places for trials. A trial holds it from the moment when the trial gets it until the trial has
given it back. The start of its process, saving and the end of its process count, if they happen while it holds the device.
The figures of a tuning, all until a trial first has the score, or until the end if none has it:

- `device_s`: the sum of the seconds during which trials held a device.
- `wall_s`: seconds from the start of the tuning. Ray is started before.
- `trials`, `epochs`: how many trials had a device, and how many epochs they trained.

`trial_start_s` and `trial_start_p90_s` are of all tunings together: seconds from the decision to start a trial, when its
hyperparameters are chosen, until the first line of the user's training function. The first trials, one for each device, are
left out: they also wait for the first process that has imported torch.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tune_records
from common import (
    LESS,
    QUICK_ROUNDS,
    Figures,
    Ratio,
    Rounds,
    arguments_parser,
    interleave,
    machine,
    report,
    row,
    spread,
)
from tune_problem import make_table
from tune_task import Task

ROUNDS = 4
TARGET = 0.71
TASK = Task(Path(), seed=0, trials=24, epochs=9, parallel=2, target=TARGET, quick=False)
ROWS = 60_000
# No trial has a score above 1, so a quick tuning runs to its end.
QUICK_TASK = replace(TASK, trials=3, epochs=1, parallel=1, target=2.0, quick=True)
QUICK_ROWS = 2_000

FOOTPLATE, OPTUNA, RAY = "footplate", "optuna", "ray tune"
MODULES = {FOOTPLATE: "tune_footplate", OPTUNA: "tune_optuna", RAY: "tune_ray"}
PACKAGES = {FOOTPLATE: "footplate", OPTUNA: "optuna", RAY: "ray"}
DEVICE = f"seconds in which trials hold a device, until the score is reached, {LESS}"
WALL = f"wall time until the score is reached, {LESS}"
COLUMNS = {
    "device_s": "device s", "wall_s": "wall s", "trials": "trials", "epochs": "epochs", "reached": "reached",
    "trial_start_s": "start of a trial, s", "trial_start_p90_s": "p90",
}  # fmt: skip


class Contest:
    """The tunings of all contestants.

    Args:
        task: what each of them gets, but for the seed and the directory.
        directory: an empty directory.
        rows: the number of training rows.

    Attributes:
        starts: the seconds until trials started, by contestant.
    """

    def __init__(self, task: Task, directory: Path, rows: int) -> None:
        self._task = task
        self._directory = directory
        self._table = directory / "table"
        self._table.mkdir()
        make_table(self._table, rows)
        self.starts: dict[str, list[float]] = {name: [] for name in MODULES}

    def measure(self, contestant: str) -> Figures:
        """Let a contestant tune in its next round, whose number is the seed."""
        seed = len(list(self._directory.glob(f"{contestant}-*")))
        place = self._directory / f"{contestant}-{seed}"
        shutil.copytree(self._table, place)
        task = replace(self._task, place=place, seed=seed)
        started: float = importlib.import_module(MODULES[contestant]).run(task)
        records = tune_records.read(place)
        self.starts[contestant] += tune_records.starts(records, task.parallel)
        figures = tune_records.figures(records, started, task.target)
        print(f"round {seed}, {contestant}: {figures}", flush=True)
        return figures


def ratios(results: Rounds) -> dict[str, Ratio]:
    """Footplate beside each peer, and beside the peer that is the best one of each round."""
    peers = [name for name in results if name != FOOTPLATE]
    if FOOTPLATE not in results or not peers:
        return {}
    found = {"device_seconds_vs_best_peer": quotients(results, peers, "best peer", "device_s", DEVICE)}
    for peer in peers:
        name = peer.replace(" ", "_")
        found[f"device_seconds_vs_{name}"] = quotients(results, [peer], peer, "device_s", DEVICE)
        found[f"wall_vs_{name}"] = quotients(results, [peer], peer, "wall_s", WALL)
    return found


def quotients(results: Rounds, peers: list[str], against: str, figure: str, measure: str) -> Ratio:
    """Quotients of Footplate's figure and the smallest one of the peers in the same round."""
    least = [min(run[figure] for run in runs) for runs in zip(*(results[peer] for peer in peers), strict=True)]
    pairs = zip(results[FOOTPLATE], least, strict=True)
    return spread([ours[figure] / theirs for ours, theirs in pairs], FOOTPLATE, against, measure)


def with_starts(shown: dict[str, Any], starts: list[float]) -> dict[str, Any]:
    """A row of the table with the times until trials started."""
    middle, slow = (float(at) for at in np.quantile(starts, (0.5, 0.9)))
    return {**shown, "starts": len(starts), "trial_start_s": middle, "trial_start_p90_s": slow}


def main() -> None:
    parser = arguments_parser(__doc__ or "", "one short tuning of each contestant, one trial at a time")
    parser.add_argument("--only", nargs="+", choices=list(MODULES), default=list(MODULES), help="these contestants")
    options = parser.parse_args()
    task, rows, rounds = (QUICK_TASK, QUICK_ROWS, QUICK_ROUNDS) if options.quick else (TASK, ROWS, ROUNDS)
    # A device is one core.
    os.environ["OMP_NUM_THREADS"] = "1"
    tested = machine()
    # The supervisor of a job that has ended may still write its last file.
    with tempfile.TemporaryDirectory(prefix="fp-", ignore_cleanup_errors=True) as directory:
        contest = Contest(task, Path(directory).resolve(), rows)
        results = interleave(options.only, contest.measure, rounds)
    shown = [with_starts(row(name, runs), contest.starts[name]) for name, runs in results.items()]
    report(
        "tune",
        f"Tunings until a trial has the score {task.target:g}",
        COLUMNS,
        shown,
        ratios(results),
        {"target": task.target},
        tested,
        ["torch", *(PACKAGES[name] for name in options.only)],
        options.json,
    )


if __name__ == "__main__":
    main()

"""The trials of a tuning as a table, for `footplate jobs describe` and `footplate tune`."""

from __future__ import annotations

from typing import Any

from footplate.cli.formats import aligned


def trial_lines(output: dict[str, Any], width: int | None = None) -> list[str]:
    """The trials, the best first, and a line about the best.

    Args:
        output: the results of a tuning, as `jobs/tuning/description.py` makes them.
        width: lines are cut at this width; None cuts none.
    """
    metric, trials = output["hyperparameterMetricTag"], output["trials"]
    names = list(trials[0]["hyperparameters"]) if trials else []
    rows = [
        {
            "trial": trial["trialId"],
            "state": trial["state"],
            "value": _cell((trial["finalMetric"] or {}).get("objectiveValue")),
            "step": _cell((trial["finalMetric"] or {}).get("trainingStep")),
            **{f"--{name}": _cell(trial["hyperparameters"][name]) for name in names},
            "cause": trial["cause"],
        }
        for trial in trials
    ]
    columns = {"trial": "trial", "state": "state", "value": metric, "step": "step"}
    columns |= {f"--{name}": name for name in names}
    columns |= {"cause": "cause"} if any(row["cause"] for row in rows) else {}
    table = aligned(rows, columns, width).splitlines() if rows else ["no trial has begun"]
    ended, most = output["completedTrialCount"], output["maxTrials"]
    return [*table, "", f"{ended} of {most} trials have ended. {_best(output)}"]


def _best(output: dict[str, Any]) -> str:
    best = output["bestTrial"]
    if best is None:
        return "None has a result yet."
    arguments = " ".join(f"--{name}={_cell(value)}" for name, value in best["hyperparameters"].items())
    return (
        f"The best is {best['jobId']}, {output['hyperparameterMetricTag']}={_cell(best['objectiveValue'])}: {arguments}"
    )


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

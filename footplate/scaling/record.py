"""A study in MLflow: one run with the table, the chart and a point for each size; beneath it, a run for each training.

The steps of the parent's metrics are numbers of processes, so MLflow draws them against the size.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.scaling.results import Size, Training
from footplate.scaling.report import NAME
from footplate.tracking.finished import Finished, log_finished
from footplate.tracking.mlflow import MLflow

if TYPE_CHECKING:
    from footplate.scaling.study import Study


class Record:
    """Logs a study.

    Args:
        experiment: of MLflow.

    Raises:
        MissingExtra: MLflow is not installed.
        ConfigError: the experiment has no name.
    """

    def __init__(self, experiment: str) -> None:
        MLflow(experiment)  # which sees whether it can
        self._experiment = experiment

    def __call__(self, study: Study) -> None:
        """Log a study that is written."""
        now = time.time()
        setup = {name: value for name, value in asdict(study.setup).items() if value is not None}
        parent = Finished(
            f"scaling-{study.setup.name}",
            min([one.began_s for one in study.trainings], default=now),
            now,
            setup,
            [(size.np, of_size(size)) for size in study.sizes if size.done],
            files(study.directory),
            {"mlflow.note.content": " ".join([study.reading, *study.notes])},
            "failed" if study.failed else "success",
        )
        children = [
            Finished(
                f"np-{one.np}-{one.repeat + 1}",
                one.began_s,
                one.began_s + one.wall_s,
                {"np": one.np, "repeat": one.repeat, "lr_factor": study.setup.rate(one.np).factor},
                [(one.np, of_training(one))],
                tags={"failure": one.failure} if one.failure else {},
                status="failed" if one.failure else "success",
            )
            for one in study.trainings
        ]
        log_finished(study.directory, self._experiment, parent, children)


def of_size(size: Size) -> dict[str, float]:
    """The medians of a size that are known, by the name of the metric."""
    medians = {
        "seconds": size.seconds,
        "seconds_with_start_up": size.wall_s,
        "samples_per_second": size.samples_per_second,
        "val_loss": size.loss,
    }
    found = {name: value.median for name, value in medians.items() if value is not None}
    found |= {f"share_{name}": share for name, share in size.shares.items()}
    return found | {
        name: value
        for name, value in {"speedup": size.speedup, "efficiency": size.efficiency}.items()
        if value is not None
    }


def of_training(training: Training) -> dict[str, float]:
    """The figures of a training that are known, by the name of the metric."""
    if training.failure:
        return {"seconds_with_start_up": training.wall_s}
    figures = {
        "seconds": training.seconds,
        "seconds_with_start_up": training.wall_s,
        "samples": training.samples,
        "samples_per_second": training.samples_per_second,
        "val_loss": training.loss,
        "epochs": training.epochs,
        "steps": training.steps,
        **{f"seconds_{name}": seconds for name, seconds in training.phases.items()},
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


def files(directory: Path) -> list[Path]:
    """What a study has written."""
    return [directory / f"{NAME}.{kind}" for kind in ("json", "md", "png")]

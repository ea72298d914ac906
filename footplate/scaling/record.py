"""Logs a study to MLflow: one run with the table, the chart and a point for each size, and a child run for each training.

The steps of the parent's metrics are the numbers of processes, so MLflow draws the metrics by size.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from footplate.scaling.report import NAME
from footplate.scaling.results import Size, Study, Training
from footplate.tracking.finished import Finished, log_finished
from footplate.tracking.mlflow import MLflow


class Record:
    """Logs a study.

    Args:
        experiment: the name of the experiment in MLflow.

    Raises:
        MissingExtra: MLflow is not installed.
        ConfigError: the experiment has no name.
    """

    def __init__(self, experiment: str) -> None:
        # The logger checks the name, and that MLflow is installed.
        MLflow(experiment)
        self._experiment = experiment

    def __call__(self, study: Study) -> None:
        """Log a study whose files are written."""
        now = time.time()
        setup = {name: value for name, value in asdict(study.setup).items() if value is not None}
        parent = Finished(
            f"scaling-{study.setup.name}",
            min([training.began_s for training in study.trainings], default=now),
            now,
            setup,
            [(size.np, of_size(size)) for size in study.sizes if size.done],
            files(study.directory),
            {"mlflow.note.content": " ".join([study.reading, *study.notes])},
            "failed" if study.failed else "success",
        )
        children = [
            Finished(
                f"np-{training.np}-{training.repeat + 1}",
                training.began_s,
                training.began_s + training.wall_s,
                {"np": training.np, "repeat": training.repeat, "lr_factor": study.setup.rate(training.np).factor},
                [(training.np, of_training(training))],
                tags={"failure": training.failure} if training.failure else {},
                status="failed" if training.failure else "success",
            )
            for training in study.trainings
        ]
        log_finished(study.directory, self._experiment, parent, children)


def of_size(size: Size) -> dict[str, float]:
    """Collect the known medians of a size, by the name of the metric."""
    medians = {
        "seconds": size.seconds,
        "seconds_with_start_up": size.wall_s,
        "samples_per_second": size.samples_per_second,
        "val_loss": size.loss,
    }
    metrics = {name: value.median for name, value in medians.items() if value is not None}
    metrics |= {f"share_{name}": share for name, share in size.shares.items()}
    ratios = {"speedup": size.speedup, "efficiency": size.efficiency}
    return metrics | {name: value for name, value in ratios.items() if value is not None}


def of_training(training: Training) -> dict[str, float]:
    """Collect the known figures of a training, by the name of the metric."""
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
    """List the files of a study."""
    return [directory / f"{NAME}.{kind}" for kind in ("json", "md", "png")]

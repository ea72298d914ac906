"""Loggers: they record the parameters, metrics, checkpoints and model of a run.

Importing this package imports no logger. A name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.core.lazy_import import lazy

if TYPE_CHECKING:
    from footplate.tracking.base import Logger as Logger
    from footplate.tracking.base import Status as Status
    from footplate.tracking.console import Console as Console
    from footplate.tracking.csv import CSV as CSV
    from footplate.tracking.jsonlines import JSONLines as JSONLines
    from footplate.tracking.mlflow import MLflow as MLflow
    from footplate.tracking.tensorboard import TensorBoard as TensorBoard
    from footplate.tracking.trackio import Trackio as Trackio
    from footplate.tracking.wandb import WandB as WandB

_HOMES = {
    "CSV": "footplate.tracking.csv",
    "Console": "footplate.tracking.console",
    "JSONLines": "footplate.tracking.jsonlines",
    "Logger": "footplate.tracking.base",
    "MLflow": "footplate.tracking.mlflow",
    "Status": "footplate.tracking.base",
    "TensorBoard": "footplate.tracking.tensorboard",
    "Trackio": "footplate.tracking.trackio",
    "WandB": "footplate.tracking.wandb",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy(__name__, _HOMES)

"""Loggers: they record the parameters, metrics, checkpoints and model of a run.

Importing this package imports no logger. A name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.core.lazy_import import lazy

if TYPE_CHECKING:
    from footplate.tracking.base import Logger as Logger
    from footplate.tracking.base import Status as Status
    from footplate.tracking.csv import CSV as CSV
    from footplate.tracking.mlflow import MLflow as MLflow
    from footplate.tracking.tensorboard import TensorBoard as TensorBoard

_HOMES = {
    "CSV": "footplate.tracking.csv",
    "Logger": "footplate.tracking.base",
    "MLflow": "footplate.tracking.mlflow",
    "Status": "footplate.tracking.base",
    "TensorBoard": "footplate.tracking.tensorboard",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy(__name__, _HOMES)

"""Loggers: where a run's parameters, metrics, checkpoints and model are kept. Importing them is light."""

from footplate.tracking.base import Logger, Status
from footplate.tracking.csv import CSV
from footplate.tracking.mlflow import MLflow
from footplate.tracking.tensorboard import TensorBoard

__all__ = ["CSV", "Logger", "MLflow", "Status", "TensorBoard"]

"""Footplate trains PyTorch models straight from lakehouse tables. A training that is killed goes on, bit for bit.

    import footplate as fp

    class Classifier(fp.Module): ...
    trainer = fp.Trainer(max_epochs=10, callbacks=[fp.EarlyStopping("val_loss")], logger=fp.MLflow("flowers"))
    trainer.fit(Classifier(), fp.TableDataModule(fp.Table("s3://lake/flowers"), batch_size=64, split={"train": 0.9}))

Importing it is light: a name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.core.adapters import register as _register
from footplate.core.foreign_checkpoints import register as _register_format
from footplate.core.lazy_import import lazy
from footplate.core.version import __version__

if TYPE_CHECKING:
    from footplate.callbacks.alert import Alert as Alert
    from footplate.callbacks.alert_channels import AlertMessage as AlertMessage
    from footplate.callbacks.alert_channels import Email as Email
    from footplate.callbacks.alert_channels import Webhook as Webhook
    from footplate.callbacks.base import Callback as Callback
    from footplate.callbacks.data_wait import DataWaitMonitor as DataWaitMonitor
    from footplate.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from footplate.callbacks.gradient_accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from footplate.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from footplate.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from footplate.callbacks.progress import ProgressBar as ProgressBar
    from footplate.callbacks.stochastic_weight_avg import StochasticWeightAveraging as StochasticWeightAveraging
    from footplate.callbacks.summary import ModelSummary as ModelSummary
    from footplate.callbacks.timer import Timer as Timer
    from footplate.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from footplate.checkpoint.export import export_model as export_model
    from footplate.checkpoint.pretrained import load_pretrained as load_pretrained
    from footplate.core.errors import CheckpointError as CheckpointError
    from footplate.core.errors import ConfigError as ConfigError
    from footplate.core.errors import DataError as DataError
    from footplate.core.errors import FootplateError as FootplateError
    from footplate.core.errors import LaunchError as LaunchError
    from footplate.core.errors import MissingExtra as MissingExtra
    from footplate.core.errors import PackageError as PackageError
    from footplate.core.errors import PeerLostError as PeerLostError
    from footplate.core.errors import Unavailable as Unavailable
    from footplate.core.goodput.run_ledger import goodput as goodput
    from footplate.core.rng import seed_everything as seed_everything
    from footplate.data.adapters.combined import CombinedLoader as CombinedLoader
    from footplate.data.loader import Loader as Loader
    from footplate.data.mixing.loader import MixedLoader as MixedLoader
    from footplate.data.table import Table as Table
    from footplate.distributed.fsdp_options import FSDPStrategy as FSDPStrategy
    from footplate.distributed.model_parallel_options import ModelParallelStrategy as ModelParallelStrategy
    from footplate.hardware.base import Accelerator as Accelerator
    from footplate.launch.runner import Runner as Runner
    from footplate.planning.study import plan as plan
    from footplate.replaying.replay import replay as replay
    from footplate.replaying.step_rows import rows as rows
    from footplate.replaying.verify import verify as verify
    from footplate.reporting.callback import Report as Report
    from footplate.reporting.report import report as report
    from footplate.scaling.study import scale as scale
    from footplate.tracking.base import Logger as Logger
    from footplate.tracking.console import Console as Console
    from footplate.tracking.csv import CSV as CSV
    from footplate.tracking.jsonlines import JSONLines as JSONLines
    from footplate.tracking.mlflow import MLflow as MLflow
    from footplate.tracking.tensorboard import TensorBoard as TensorBoard
    from footplate.tracking.trackio import Trackio as Trackio
    from footplate.tracking.wandb import WandB as WandB
    from footplate.training.datamodule import DataModule as DataModule
    from footplate.training.module import Module as Module
    from footplate.training.profiler.settings import Profiler as Profiler
    from footplate.training.table_datamodule import TableDataModule as TableDataModule
    from footplate.training.trainer import Trainer as Trainer
    from footplate.training.tuner.tuner import Tuner as Tuner

_HOMES = {
    "Accelerator": "footplate.hardware.base",
    "Alert": "footplate.callbacks.alert",
    "AlertMessage": "footplate.callbacks.alert_channels",
    "CSV": "footplate.tracking.csv",
    "Callback": "footplate.callbacks.base",
    "CheckpointError": "footplate.core.errors",
    "CombinedLoader": "footplate.data.adapters.combined",
    "ConfigError": "footplate.core.errors",
    "Console": "footplate.tracking.console",
    "DataError": "footplate.core.errors",
    "DataModule": "footplate.training.datamodule",
    "DataWaitMonitor": "footplate.callbacks.data_wait",
    "EMAWeightAveraging": "footplate.callbacks.weight_averaging",
    "EarlyStopping": "footplate.callbacks.early_stopping",
    "Email": "footplate.callbacks.alert_channels",
    "FSDPStrategy": "footplate.distributed.fsdp_options",
    "FootplateError": "footplate.core.errors",
    "GradientAccumulationScheduler": "footplate.callbacks.gradient_accumulation",
    "LearningRateMonitor": "footplate.callbacks.lr_monitor",
    "JSONLines": "footplate.tracking.jsonlines",
    "LaunchError": "footplate.core.errors",
    "Loader": "footplate.data.loader",
    "Logger": "footplate.tracking.base",
    "MLflow": "footplate.tracking.mlflow",
    "MissingExtra": "footplate.core.errors",
    "MixedLoader": "footplate.data.mixing.loader",
    "ModelCheckpoint": "footplate.callbacks.model_checkpoint",
    "ModelParallelStrategy": "footplate.distributed.model_parallel_options",
    "ModelSummary": "footplate.callbacks.summary",
    "Module": "footplate.training.module",
    "PackageError": "footplate.core.errors",
    "PeerLostError": "footplate.core.errors",
    "Profiler": "footplate.training.profiler.settings",
    "ProgressBar": "footplate.callbacks.progress",
    "Report": "footplate.reporting.callback",
    "Runner": "footplate.launch.runner",
    "StochasticWeightAveraging": "footplate.callbacks.stochastic_weight_avg",
    "Table": "footplate.data.table",
    "TableDataModule": "footplate.training.table_datamodule",
    "TensorBoard": "footplate.tracking.tensorboard",
    "Timer": "footplate.callbacks.timer",
    "Trackio": "footplate.tracking.trackio",
    "Trainer": "footplate.training.trainer",
    "Tuner": "footplate.training.tuner.tuner",
    "Unavailable": "footplate.core.errors",
    "WandB": "footplate.tracking.wandb",
    "Webhook": "footplate.callbacks.alert_channels",
    "export_model": "footplate.checkpoint.export",
    "goodput": "footplate.core.goodput.run_ledger",
    "load_pretrained": "footplate.checkpoint.pretrained",
    "plan": "footplate.planning.study",
    "replay": "footplate.replaying.replay",
    "report": "footplate.reporting.report",
    "rows": "footplate.replaying.step_rows",
    "scale": "footplate.scaling.study",
    "seed_everything": "footplate.core.rng",
    "verify": "footplate.replaying.verify",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


__getattr__ = lazy(__name__, _HOMES)

# The libraries whose modules, callbacks and loggers run here. Each adapter is imported when it is first needed.
_register("lightning", "footplate.compat.lightning.adapter:ADAPTER")
_register("pytorch_lightning", "footplate.compat.lightning.adapter:ADAPTER")
_register_format("footplate.compat.checkpoints:LIGHTNING")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

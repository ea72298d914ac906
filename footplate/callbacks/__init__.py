"""Callbacks: objects whose hooks the trainer calls during a run. Importing this package imports none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.core.lazy_import import lazy

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

_HOMES = {
    "Alert": "footplate.callbacks.alert",
    "AlertMessage": "footplate.callbacks.alert_channels",
    "Email": "footplate.callbacks.alert_channels",
    "Webhook": "footplate.callbacks.alert_channels",
    "Callback": "footplate.callbacks.base",
    "DataWaitMonitor": "footplate.callbacks.data_wait",
    "EarlyStopping": "footplate.callbacks.early_stopping",
    "GradientAccumulationScheduler": "footplate.callbacks.gradient_accumulation",
    "LearningRateMonitor": "footplate.callbacks.lr_monitor",
    "ModelCheckpoint": "footplate.callbacks.model_checkpoint",
    "ProgressBar": "footplate.callbacks.progress",
    "StochasticWeightAveraging": "footplate.callbacks.stochastic_weight_avg",
    "ModelSummary": "footplate.callbacks.summary",
    "Timer": "footplate.callbacks.timer",
    "EMAWeightAveraging": "footplate.callbacks.weight_averaging",
}

__all__ = [
    "Alert",
    "AlertMessage",
    "Callback",
    "DataWaitMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "Email",
    "GradientAccumulationScheduler",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "StochasticWeightAveraging",
    "Timer",
    "Webhook",
]

__getattr__ = lazy(__name__, _HOMES)

"""Callbacks: objects whose hooks the trainer calls during a run."""

from footplate.callbacks.alert import Alert
from footplate.callbacks.alert_channels import AlertMessage, Email, Webhook
from footplate.callbacks.base import Callback
from footplate.callbacks.data_wait import DataWaitMonitor
from footplate.callbacks.early_stopping import EarlyStopping
from footplate.callbacks.gradient_accumulation import GradientAccumulationScheduler
from footplate.callbacks.lr_monitor import LearningRateMonitor
from footplate.callbacks.model_checkpoint import ModelCheckpoint
from footplate.callbacks.progress import ProgressBar
from footplate.callbacks.stochastic_weight_avg import StochasticWeightAveraging
from footplate.callbacks.summary import ModelSummary
from footplate.callbacks.timer import Timer
from footplate.callbacks.weight_averaging import EMAWeightAveraging

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

"""TensorFlow's Estimator and TPUEstimator, with torch modules inside `model_fn`, on Footplate's Trainer.

    from footplate.compat.estimator import Estimator, EstimatorSpec, ModeKeys, get_module

    spec.py         the arguments of an Estimator, and the answer of a `model_fn`
    inout.py        batches of an `input_fn`, and predictions by rows
    model.py        a `model_fn` as a `Module`
    estimator.py    train, evaluate, predict, export
    tpu.py          the same with batch sizes, and several steps in a call
    weights.py      loads all or some weights of a checkpoint
    exporters.py    writes model files for serving during training

docs/guide/estimators.md lists what is supported and what differs.
"""

from footplate.compat.estimator.estimator import Estimator, train_and_evaluate
from footplate.compat.estimator.exporters import Exporter, FinalExporter, LatestExporter
from footplate.compat.estimator.model import get_module
from footplate.compat.estimator.spec import (
    EstimatorSpec,
    EvalSpec,
    ModeKeys,
    RunConfig,
    TPUConfig,
    TPUEstimatorSpec,
    TrainSpec,
    WarmStartSettings,
)
from footplate.compat.estimator.tpu import TPUEstimator

__all__ = [
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Exporter",
    "FinalExporter",
    "LatestExporter",
    "ModeKeys",
    "RunConfig",
    "TPUConfig",
    "TPUEstimator",
    "TPUEstimatorSpec",
    "TrainSpec",
    "WarmStartSettings",
    "get_module",
    "train_and_evaluate",
]

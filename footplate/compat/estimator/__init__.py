"""TensorFlow's Estimator and TPUEstimator, with torch modules inside `model_fn`, on Footplate's Trainer.

    from footplate.compat.estimator import Estimator, EstimatorSpec, ModeKeys, get_module

    spec.py         what is passed to and fro
    inout.py        what an `input_fn` returns, and predictions by rows
    model.py        what becomes of a `model_fn`
    estimator.py    train, evaluate, predict, export
    tpu.py          the same with batch sizes, and several steps in a call
    weights.py      weights of a checkpoint into the modules, all or some
    exporters.py    files for those who serve the model, written as it is trained

What is there and what differs: docs/guide/estimators.md.
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

"""What an Estimator is told, and what a `model_fn` answers: plain data, under TensorFlow's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from footplate.compat.estimator.exporters import Exporter

OURS = (
    "max_steps", "max_epochs", "callbacks", "default_root_dir", "iterations_per_loop",
    "limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps",
)  # fmt: skip
TAKEN = ("loss", "global_step")  # what evaluate() says of its own
MEASURED = "val_"  # stands before the names of what is measured, in a trainer's metrics


class ModeKeys:
    """What a `model_fn` is called for; the values are TensorFlow's."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)


@dataclass(frozen=True)
class EstimatorSpec:
    """What a `model_fn` answers for one batch.

    Attributes:
        mode: the mode that it was called for.
        predictions: for PREDICT: a tensor, or a dict of tensors; their first dimension is the batch.
        loss: for TRAIN and EVAL: the mean over the batch.
        train_op: for TRAIN: a function without arguments that returns the optimizer, or anything else that
            `configure_optimizers` may return. It is called once, before the first step.
        eval_metric_ops: for EVAL: names and means over the batch; the result is their mean over all rows.
    """

    mode: str
    predictions: Tensor | Mapping[str, Tensor] | None = None
    loss: Tensor | None = None
    train_op: Callable[[], Any] | None = None
    eval_metric_ops: Mapping[str, Any] | None = None

    def metrics(self) -> Mapping[str, Any]:
        """Names and means over the batch, of an evaluation."""
        return self.eval_metric_ops or {}


def evaluated(metrics: Mapping[str, float]) -> dict[str, float]:
    """What was measured, of a trainer's metrics, under the names that a `model_fn` has for it."""
    return {name.removeprefix(MEASURED): value for name, value in metrics.items() if name.startswith(MEASURED)}


@dataclass(frozen=True)
class TPUEstimatorSpec(EstimatorSpec):
    """An `EstimatorSpec` with its metrics in TPUEstimator's form.

    Attributes:
        eval_metrics: `(function, tensors)`: the function is given the tensors, one by one or by their names, and returns
            names and means over the batch.
    """

    eval_metrics: tuple[Callable[..., Mapping[str, Any]], Any] | None = None

    def metrics(self) -> Mapping[str, Any]:
        if self.eval_metrics is None:
            return super().metrics()
        function, tensors = self.eval_metrics
        return function(**tensors) if isinstance(tensors, Mapping) else function(*tensors)


@dataclass(frozen=True)
class TPUConfig:
    """What concerns TPUs.

    Attributes:
        iterations_per_loop: how many steps a call of the compiled program makes.
        num_shards: how many devices share a batch; None for all.
    """

    iterations_per_loop: int = 2
    num_shards: int | None = None


@dataclass(frozen=True)
class RunConfig:
    """How an Estimator runs.

    Attributes:
        model_dir: where checkpoints and metrics lie, if the Estimator isn't told.
        tf_random_seed: the seed of everything, the modules' first weights included.
        save_checkpoints_steps: save after every so many steps; in `train_and_evaluate`, evaluate then too.
        keep_checkpoint_max: keep the newest so many checkpoints; None or 0 keeps all.
        log_step_count_steps: read and log metrics after every so many steps.
        tpu_config: for a TPUEstimator.
        trainer: further arguments of `footplate.Trainer`: `{"accelerator": "xla", "devices": 8}`.
    """

    model_dir: str | Path | None = None
    tf_random_seed: int | None = None
    save_checkpoints_steps: int = 1000
    keep_checkpoint_max: int | None = 5
    log_step_count_steps: int = 100
    tpu_config: TPUConfig = field(default_factory=TPUConfig)
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.save_checkpoints_steps < 1:
            raise ConfigError(f"RunConfig(save_checkpoints_steps={self.save_checkpoints_steps}): expected 1 or more.")
        if self.keep_checkpoint_max is not None and self.keep_checkpoint_max < 0:
            raise ConfigError(
                f"RunConfig(keep_checkpoint_max={self.keep_checkpoint_max}): expected 1 or more, or None for all."
            )
        taken = [name for name in OURS if name in self.trainer]
        if taken:
            raise ConfigError(
                f"RunConfig(trainer={{{taken[0]!r}: …}}): the Estimator sets it itself, from steps, hooks, model_dir, "
                "EvalSpec and TPUConfig. Leave it out."
            )


@dataclass(frozen=True)
class TrainSpec:
    """What `train_and_evaluate` trains on.

    Attributes:
        input_fn: see `Estimator.train`.
        max_steps: until this global step.
        hooks: callbacks.
    """

    input_fn: Callable[..., Any]
    max_steps: int
    hooks: tuple[Any, ...] = ()


@dataclass(frozen=True)
class EvalSpec:
    """What `train_and_evaluate` evaluates on, at every checkpoint.

    Attributes:
        input_fn: see `Estimator.evaluate`.
        steps: on so many batches; None for all.
        exporters: one or several, which write the model for those who serve it.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    exporters: Exporter | Sequence[Exporter] = ()


@dataclass(frozen=True)
class WarmStartSettings:
    """Which tensors of another checkpoint training begins with, where `model_dir` has no checkpoint yet.

    Attributes:
        ckpt_to_initialize_from: a checkpoint, or the `model_dir` of an Estimator, whose newest is taken.
        vars_to_warm_start: how the names of tensors begin, as a regular expression or several: `"net.0."`; by default all,
            batch norm's statistics among them.
        var_name_to_prev_var_name: what they are called there, for those that have another name here.
    """

    ckpt_to_initialize_from: str | Path
    vars_to_warm_start: str | Sequence[str] = ".*"
    var_name_to_prev_var_name: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"WarmStartSettings(vars_to_warm_start={pattern!r}): expected a regular expression ({error})."
                ) from error

    @property
    def patterns(self) -> tuple[str, ...]:
        """`vars_to_warm_start`, of which one alone may be given as it is."""
        given = self.vars_to_warm_start
        return (given,) if isinstance(given, str) else tuple(given)

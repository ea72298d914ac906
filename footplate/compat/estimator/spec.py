"""Settings of an Estimator and the answer of a `model_fn`: plain data, under TensorFlow's names."""

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

# Arguments of the Trainer that the Estimator sets itself.
OURS = (
    "max_steps", "max_epochs", "callbacks", "default_root_dir", "iterations_per_loop",
    "limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps",
)  # fmt: skip
# Names that evaluate() uses itself.
TAKEN = ("loss", "global_step")
# The prefix of an evaluation's metrics in the trainer.
MEASURED = "val_"


class ModeKeys:
    """The modes of a `model_fn`; the values are TensorFlow's.

    Examples:
        >>> from footplate.compat.estimator import ModeKeys
        >>> ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT
        ('train', 'eval', 'infer')
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)


@dataclass(frozen=True)
class EstimatorSpec:
    """The answer of a `model_fn` for one batch.

    Attributes:
        mode: the mode of the call.
        predictions: for PREDICT: a tensor, or a dict of tensors. Their first dimension is the batch.
        loss: for TRAIN and EVAL: the mean over the batch.
        train_op: for TRAIN: a function without arguments that returns the optimizer, or anything else that
            `configure_optimizers` may return. It is called once, before the first step.
        eval_metric_ops: for EVAL: means over the batch by name. The result is their mean over all rows.

    Examples:
        >>> from footplate.compat.estimator import EstimatorSpec, ModeKeys
        >>> errors = {"error": torch.tensor(0.25)}
        >>> EstimatorSpec(ModeKeys.EVAL, loss=torch.tensor(0.5), eval_metric_ops=errors).metrics()
        {'error': tensor(0.2500)}
    """

    mode: str
    predictions: Tensor | Mapping[str, Tensor] | None = None
    loss: Tensor | None = None
    train_op: Callable[[], Any] | None = None
    eval_metric_ops: Mapping[str, Any] | None = None

    def metrics(self) -> Mapping[str, Any]:
        """The metrics of an evaluation: means over the batch by name."""
        return self.eval_metric_ops or {}


def evaluated(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an evaluation among a trainer's metrics, under the names of the `model_fn`."""
    return {name.removeprefix(MEASURED): value for name, value in metrics.items() if name.startswith(MEASURED)}


@dataclass(frozen=True)
class TPUEstimatorSpec(EstimatorSpec):
    """An `EstimatorSpec` with its metrics in TPUEstimator's form.

    Attributes:
        eval_metrics: `(function, tensors)`: the function gets the tensors, one by one or by name, and returns means over
            the batch by name.

    Examples:
        >>> from footplate.compat.estimator import ModeKeys, TPUEstimatorSpec
        >>> def measure(labels, predictions):
        ...     return {"error": (labels - predictions).abs().mean()}
        >>> tensors = [torch.ones(4), torch.zeros(4)]
        >>> TPUEstimatorSpec(ModeKeys.EVAL, loss=torch.tensor(0.5), eval_metrics=(measure, tensors)).metrics()
        {'error': tensor(1.)}
    """

    eval_metrics: tuple[Callable[..., Mapping[str, Any]], Any] | None = None

    def metrics(self) -> Mapping[str, Any]:
        if self.eval_metrics is None:
            return super().metrics()
        function, tensors = self.eval_metrics
        return function(**tensors) if isinstance(tensors, Mapping) else function(*tensors)


@dataclass(frozen=True)
class TPUConfig:
    """Settings for TPUs.

    Attributes:
        iterations_per_loop: the number of steps in one call of the compiled program.
        num_shards: the number of devices that share a batch; None for all.

    Examples:
        >>> from footplate.compat.estimator import RunConfig, TPUConfig
        >>> config = RunConfig(tpu_config=TPUConfig(iterations_per_loop=100, num_shards=8))
    """

    iterations_per_loop: int = 2
    num_shards: int | None = None


@dataclass(frozen=True)
class RunConfig:
    """Settings of an Estimator's runs.

    Attributes:
        model_dir: the directory of checkpoints and metrics, if the Estimator gets none.
        tf_random_seed: the seed of everything, the modules' first weights included.
        save_checkpoints_steps: the number of steps between two checkpoints; `train_and_evaluate` evaluates then too.
        keep_checkpoint_max: the number of checkpoints to keep, the newest ones; None or 0 keeps all.
        log_step_count_steps: the number of steps between two reports of metrics.
        tpu_config: settings of a TPUEstimator.
        trainer: further arguments of `footplate.Trainer`: `{"accelerator": "xla", "devices": 8}`.

    Examples:
        >>> from footplate.compat.estimator import Estimator, RunConfig
        >>> config = RunConfig(save_checkpoints_steps=4, keep_checkpoint_max=1, trainer={"precision": "bf16-mixed"})
        >>> estimator = Estimator(model_fn, "runs/bf16", config, {"lr": 0.1}).train(input_fn, max_steps=8)
        >>> estimator.latest_checkpoint().name
        'model-8.ckpt'
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
        refused = [name for name in OURS if name in self.trainer]
        if refused:
            raise ConfigError(
                f"RunConfig(trainer={{{refused[0]!r}: …}}): the Estimator sets it itself, from steps, hooks, model_dir, "
                "EvalSpec and TPUConfig. Leave it out."
            )


@dataclass(frozen=True)
class TrainSpec:
    """The training of `train_and_evaluate`.

    Attributes:
        input_fn: see `Estimator.train`.
        max_steps: the global step at which training ends.
        hooks: callbacks.

    Examples:
        >>> from footplate.compat.estimator import EvalSpec, TrainSpec, train_and_evaluate
        >>> training = TrainSpec(input_fn, max_steps=16)
        >>> train_and_evaluate(estimator, training, EvalSpec(input_fn))["global_step"]
        16
    """

    input_fn: Callable[..., Any]
    max_steps: int
    hooks: tuple[Any, ...] = ()


@dataclass(frozen=True)
class EvalSpec:
    """The evaluation of `train_and_evaluate` at every checkpoint.

    Attributes:
        input_fn: see `Estimator.evaluate`.
        steps: the number of batches; None for all.
        exporters: an exporter or several, which write the model for serving.

    Examples:
        >>> from footplate.compat.estimator import EvalSpec, TrainSpec, train_and_evaluate
        >>> evaluation = EvalSpec(input_fn, steps=4)
        >>> train_and_evaluate(estimator, TrainSpec(input_fn, max_steps=16), evaluation)["global_step"]
        16
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    exporters: Exporter | Sequence[Exporter] = ()


@dataclass(frozen=True)
class WarmStartSettings:
    """The tensors of another checkpoint that training begins with, if `model_dir` has no checkpoint yet.

    Attributes:
        ckpt_to_initialize_from: a checkpoint, or the `model_dir` of an Estimator, whose newest checkpoint is used.
        vars_to_warm_start: a regular expression, or several, that match the beginning of the tensors' names: `"net.0."`.
            By default all tensors, batch norm's statistics among them.
        var_name_to_prev_var_name: names in the checkpoint, by name in the model, for tensors whose names differ.

    Examples:
        >>> from footplate.compat.estimator import Estimator, WarmStartSettings
        >>> settings = WarmStartSettings("runs/estimator", vars_to_warm_start="net.weight")
        >>> other = Estimator(model_fn, "runs/warm", params={"lr": 0.1}, warm_start_from=settings)
        >>> other.train(input_fn, max_steps=4).global_step
        4
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
        """The regular expressions of `vars_to_warm_start`."""
        patterns = self.vars_to_warm_start
        return (patterns,) if isinstance(patterns, str) else tuple(patterns)

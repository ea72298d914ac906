"""`Estimator`: trains to a global step, with all of its state in a directory.

The state of an Estimator is in its `model_dir`. Each call makes a Trainer:

    train       continues from the newest checkpoint, and saves at intervals and at the end
    evaluate    loads the newest checkpoint, and computes metrics
    predict     loads the newest checkpoint, and yields predictions row by row
    train_and_evaluate    trains, and evaluates and exports at every checkpoint

So a killed script continues when it is started again. With a larger `max_steps`, a finished script continues too.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from footplate import checkpoint
from footplate.callbacks import Callback, ModelCheckpoint
from footplate.checkpoint.export import export_model
from footplate.checkpoint.storage import Place, to_place
from footplate.compat.estimator import weights
from footplate.compat.estimator.exporters import Exporting, export_all, exporters_of
from footplate.compat.estimator.inout import InputFn, batches_of, chosen, rows_of
from footplate.compat.estimator.model import ModelFn, ModelOfFunction, Serving
from footplate.compat.estimator.spec import (
    MODES,
    EvalSpec,
    ModeKeys,
    RunConfig,
    TrainSpec,
    WarmStartSettings,
    evaluated,
)
from footplate.core.errors import CheckpointError, ConfigError
from footplate.core.rng import seed_globals
from footplate.training.trainer import Trainer

log = logging.getLogger(__name__)


class Estimator:
    """Trains, evaluates and predicts with a `model_fn` (see `footplate.compat.estimator.model`).

    An `input_fn` takes no argument, or `params`. It returns an object that can be iterated several times: a
    `footplate.Loader`, a torch DataLoader, a list. A batch that is a pair is features and labels; any other is features.

    Args:
        model_fn: `(features, labels, mode, params, config) → EstimatorSpec`; it may leave out arguments.
        model_dir: the directory of checkpoints, metrics and exports; by default the config's, or else a new temporary
            directory. If it is a URI of an object store (`gs://bucket/name`), only checkpoints go there, and all else goes
            to `runs/name` on this machine.
        config: see `RunConfig`.
        params: passed to `model_fn` and `input_fn`.
        warm_start_from: a checkpoint, or another Estimator's `model_dir`, whose weights training begins with if
            `model_dir` has no checkpoint yet; or `WarmStartSettings`, for some of the weights.

    Attributes:
        run_dir: the directory of metrics and exports.

    Examples:
        >>> from footplate.compat.estimator import Estimator, EstimatorSpec, ModeKeys, get_module
        >>> def model_fn(features, labels, mode, params):
        ...     net = get_module("net", lambda: torch.nn.Linear(4, 1))
        ...     predictions = net(features).squeeze(1)
        ...     if mode == ModeKeys.PREDICT:
        ...         return EstimatorSpec(mode, predictions=predictions)
        ...     loss = torch.nn.functional.mse_loss(predictions, labels)
        ...     return EstimatorSpec(mode, loss=loss, train_op=lambda: torch.optim.SGD(net.parameters(), lr=params["lr"]))
        >>> def input_fn():
        ...     return train
        >>> estimator = Estimator(model_fn, "runs/estimator", params={"lr": 0.1})
        >>> estimator.train(input_fn, max_steps=8).global_step
        8
        >>> sorted(estimator.evaluate(input_fn))
        ['global_step', 'loss']
        >>> len(list(estimator.predict(input_fn)))
        32
    """

    def __init__(
        self,
        model_fn: ModelFn,
        model_dir: str | Path | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | Path | WarmStartSettings | None = None,
    ) -> None:
        self.config = config or RunConfig()
        self.params: dict[str, Any] = dict(params or {})
        directory = model_dir or self.config.model_dir
        if directory is None:
            directory = tempfile.mkdtemp(prefix="footplate-estimator-")
            log.warning("No model_dir was given: %s is used.", directory)
        self.model_dir = to_place(directory)
        self.run_dir = self.model_dir if isinstance(self.model_dir, Path) else Path("runs") / self.model_dir.name
        self._model_fn = model_fn
        self._model = self._new_model()
        if isinstance(warm_start_from, (str, Path)):
            warm_start_from = WarmStartSettings(warm_start_from)
        self._warm_start = warm_start_from

    def train(
        self,
        input_fn: InputFn,
        hooks: Sequence[Callback] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
    ) -> Estimator:
        """Train, from the newest checkpoint in `model_dir` if there is one.

        Args:
            input_fn: see the class. It is called twice: for the batch that modules are made with, and for training.
            hooks: callbacks.
            steps: the number of further steps, with as many passes over the data as needed.
            max_steps: the global step at which training ends; nothing is done if it is reached. Without `steps` and
                `max_steps`, training makes one pass over the data.

        Returns:
            The Estimator.

        Raises:
            ConfigError: both are given, or the result of `input_fn` or `model_fn` can't be used.
        """
        end = self._end(steps, max_steps)
        if end is not None and self.global_step >= end:
            log.info("Nothing to train: step %d is reached.", end)
            return self
        self._fit(input_fn, hooks or (), end)
        return self

    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Sequence[Callback] | None = None,
        checkpoint_path: str | Place | None = None,
    ) -> dict[str, float]:
        """Compute the metrics of the model of a checkpoint.

        Args:
            input_fn: see the class.
            steps: the number of batches; None for all.
            hooks: callbacks.
            checkpoint_path: the checkpoint; by default the newest.

        Returns:
            `loss`, the metrics, and `global_step`.

        Raises:
            CheckpointError: there is no checkpoint.
        """
        self._prepare(ModeKeys.EVAL, input_fn)
        step = self._load(self._model, checkpoint_path)
        trainer = self._trainer(callbacks=list(hooks or ()), saves=False, limit_val_batches=steps)
        (metrics,) = trainer.validate(self._model, [self._input(input_fn, ModeKeys.EVAL)], verbose=False)
        return evaluated(metrics) | {"global_step": step}

    def predict(
        self,
        input_fn: InputFn,
        predict_keys: Sequence[str] | None = None,
        hooks: Sequence[Callback] | None = None,
        checkpoint_path: str | Place | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Predict with the model of a checkpoint. All predictions are made before the first is yielded.

        Args:
            input_fn: see the class.
            predict_keys: the predictions to yield; None for all.
            hooks: callbacks.
            checkpoint_path: the checkpoint; by default the newest.
            yield_single_examples: yield one row at a time; else one batch.

        Yields:
            The predictions of `model_fn`: a tensor, or a dict of tensors.

        Raises:
            CheckpointError: there is no checkpoint.
            ConfigError: a key that isn't among the predictions.
        """
        self._prepare(ModeKeys.PREDICT, input_fn)
        self._load(self._model, checkpoint_path)
        trainer = self._trainer(callbacks=list(hooks or ()), saves=False)
        for batch in trainer.predict(self._model, [self._input(input_fn, ModeKeys.PREDICT)]):
            predictions = chosen(batch, predict_keys)
            if yield_single_examples:
                yield from rows_of(predictions)
            else:
                yield predictions

    def export_saved_model(
        self,
        export_dir_base: str | Path,
        serving_input_receiver_fn: Callable[[], Any],
        checkpoint_path: str | Place | None = None,
    ) -> Path:
        """Write the model of a checkpoint as a file that `torch.export.load(path).module()` runs without this code.

        Args:
            export_dir_base: the directory of exports; the file is `TIME/model.pt2` in it.
            serving_input_receiver_fn: returns an example of features, a batch of any size.
            checkpoint_path: the checkpoint; by default the newest.

        Returns:
            The file, a model that takes features and returns predictions.

        Raises:
            CheckpointError: there is no checkpoint.
            ConfigError: torch can't export the model.
        """
        features = serving_input_receiver_fn()

        # An exporter calls this while `self._model` is being trained.
        model = self._new_model()
        model.build(ModeKeys.PREDICT, features)
        self._load(model, checkpoint_path)
        path = Path(export_dir_base) / str(time.time_ns() // 1_000_000) / "model.pt2"
        return export_model(Serving(model), path, example_input=(features,))

    @property
    def global_step(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        newest = self.latest_checkpoint()
        return 0 if newest is None else int(checkpoint.read_meta(newest)["global_step"])

    def latest_checkpoint(self) -> Place | None:
        """The newest complete checkpoint in `model_dir`."""
        return weights.newest(self.model_dir)

    # Parts of a call

    def _new_model(self) -> ModelOfFunction:
        return ModelOfFunction(self._model_fn, {mode: self._params_of(mode) for mode in MODES}, self.config)

    def _fit(
        self, input_fn: InputFn, hooks: Sequence[Callback], end: int | None, evaluation: EvalSpec | None = None
    ) -> None:
        """Train to a global step, or to the end of a pass; with an evaluation, evaluate at every checkpoint."""
        # The present model may have the weights of a checkpoint that it was evaluated with.
        begins = self.latest_checkpoint() is None
        if begins:
            self._model = self._new_model()
        self._prepare(ModeKeys.TRAIN, input_fn)
        if begins and self._warm_start is not None:
            weights.warm_start(self._model, self._warm_start)

        saver = self._saver()
        callbacks = [saver, *hooks, *([_OnePass()] if end is None else [])]
        arguments: dict[str, Any] = {"max_steps": -1 if end is None else end}

        val_dataloaders = None
        if evaluation is not None:
            self._prepare(ModeKeys.EVAL, evaluation.input_fn)
            val_dataloaders = [self._input(evaluation.input_fn, ModeKeys.EVAL)]
            exporters = exporters_of(evaluation)
            if exporters:
                callbacks.append(Exporting(self, exporters, saver))
            batches_per_step = self.config.trainer.get("accumulate_grad_batches", 1)
            arguments |= {
                "val_check_interval": self.config.save_checkpoints_steps * batches_per_step,
                "check_val_every_n_epoch": None,
                "limit_val_batches": evaluation.steps,
                "num_sanity_val_steps": 0,
            }
        trainer = self._trainer(callbacks=callbacks, **arguments)
        trainer.fit(self._model, self._input(input_fn, ModeKeys.TRAIN), val_dataloaders, ckpt_path="last")

    def _end(self, steps: int | None, max_steps: int | None) -> int | None:
        """The global step at which training ends; None for the end of a pass."""
        if steps is not None and max_steps is not None:
            raise ConfigError(f"steps={steps} and max_steps={max_steps} are both given: keep one of them.")
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: expected 1 or more.")
        return max_steps if steps is None else self.global_step + steps

    def _prepare(self, mode: str, input_fn: InputFn) -> None:
        """Make the modules of a mode with the first batch of its data, unless they are made."""
        if mode in self._model.built:
            return
        if self.config.tf_random_seed is not None:
            seed_globals(self.config.tf_random_seed)
        batch = next(iter(self._input(input_fn, mode)), None)
        if batch is None:
            raise ConfigError("input_fn returned no batch, and one is needed to make the modules. Check its data.")
        self._model.build(mode, batch)

    def _input(self, input_fn: InputFn, mode: str) -> Any:
        return batches_of(input_fn, self._params_of(mode))

    def _params_of(self, mode: str) -> dict[str, Any]:
        """The `params` of `model_fn` and `input_fn` in a mode."""
        return self.params

    def _trainer(self, callbacks: list[Any], saves: bool = True, **arguments: Any) -> Trainer:
        settings: dict[str, Any] = {
            "log_every_n_steps": self.config.log_step_count_steps,
            "enable_model_summary": False,
            "max_epochs": -1,
            "seed": self.config.tf_random_seed,
            **({} if saves else {"logger": False, "enable_checkpointing": False}),
            **self._hardware(),
            **self.config.trainer,
        }
        return Trainer(**settings, **arguments, callbacks=callbacks, default_root_dir=self.run_dir)

    def _hardware(self) -> dict[str, Any]:
        """The Trainer's arguments about devices."""
        return {}

    def _saver(self) -> ModelCheckpoint:
        return ModelCheckpoint(
            dirpath=self.model_dir / weights.CHECKPOINTS,
            filename="model-{step}",
            auto_insert_metric_name=False,
            every_n_train_steps=self.config.save_checkpoints_steps,
            save_top_k=self.config.keep_checkpoint_max or -1,
        )

    def _load(self, model: ModelOfFunction, path: str | Place | None) -> int:
        """Load the weights of a checkpoint, the newest by default. Return its global step."""
        path = path or self.latest_checkpoint()
        if path is None:
            raise CheckpointError(f"There is no checkpoint in {self.model_dir / weights.CHECKPOINTS}: train first.")
        return weights.load(model, path)


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> dict[str, float]:
    """Train until `max_steps`; evaluate and export whenever a checkpoint is saved, and at the end.

    Args:
        estimator: the Estimator.
        train_spec: the data and the end of training.
        eval_spec: the data and the exporters of the evaluation.

    Returns:
        The result of `Estimator.evaluate` at the end. The metrics during training go to the loggers, as `val_…`.

    Raises:
        ConfigError: two exporters have one name, or a reason of `Estimator.train`.

    Examples:
        >>> from footplate.compat.estimator import EvalSpec, TrainSpec, train_and_evaluate
        >>> metrics = train_and_evaluate(estimator, TrainSpec(input_fn, max_steps=16), EvalSpec(input_fn))
        >>> metrics["global_step"]
        16
    """
    exporters = exporters_of(eval_spec)
    if estimator.global_step < train_spec.max_steps:
        estimator._fit(train_spec.input_fn, train_spec.hooks, train_spec.max_steps, eval_spec)
    metrics = estimator.evaluate(eval_spec.input_fn, steps=eval_spec.steps)
    path = estimator.latest_checkpoint()
    assert path is not None
    export_all(exporters, estimator, path, metrics, final=True)
    return metrics


class _OnePass(Callback):
    """Ends training after one pass over the data, or after the rest of the pass that a checkpoint is in."""

    sees_weights = False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._began = trainer.progress.batches

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.should_stop = trainer.progress.batches > self._began

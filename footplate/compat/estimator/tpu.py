"""`TPUEstimator`: an Estimator that knows batch sizes, and makes several steps in one call of the compiled program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from footplate.compat.estimator.estimator import Estimator
from footplate.compat.estimator.inout import InputFn, takes_params
from footplate.compat.estimator.model import ModelFn
from footplate.compat.estimator.spec import ModeKeys, RunConfig, WarmStartSettings
from footplate.core.errors import ConfigError
from footplate.training.trainer import Trainer

_ARGUMENTS = {ModeKeys.TRAIN: "train", ModeKeys.EVAL: "eval", ModeKeys.PREDICT: "predict"}


class TPUEstimator(Estimator):
    """An Estimator for TPUs: batch sizes belong to it, and several steps are made in one call of the compiled program.

    `params["batch_size"]` is that of the mode, of all devices together, in `input_fn` and in `model_fn`, where it is None
    if none was given. How many rows one device has, `features` says.

    Args:
        model_fn: see `Estimator`.
        model_dir: see `Estimator`.
        config: its `tpu_config` has `iterations_per_loop` and `num_shards`.
        params: without `batch_size`.
        use_tpu: False trains on what `accelerator="auto"` finds.
        train_batch_size: rows of a batch of training.
        eval_batch_size: of evaluation.
        predict_batch_size: of prediction.
        warm_start_from: see `Estimator`.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        model_dir: str | Path | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        use_tpu: bool = True,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
        warm_start_from: str | Path | WarmStartSettings | None = None,
    ) -> None:
        if params and "batch_size" in params:
            raise ConfigError('params["batch_size"] is the TPUEstimator\'s: give train_batch_size=… and its like.')
        self.use_tpu = use_tpu
        sizes = (train_batch_size, eval_batch_size, predict_batch_size)
        self._batch_sizes = dict(zip(_ARGUMENTS, sizes, strict=True))
        super().__init__(model_fn, model_dir, config, params, warm_start_from)

    def _params_of(self, mode: str) -> dict[str, Any]:
        return {**self.params, "batch_size": self._batch_sizes[mode]}

    def _input(self, input_fn: InputFn, mode: str) -> Any:
        if self._batch_sizes[mode] is None and takes_params(input_fn):
            raise ConfigError(
                f"input_fn takes params, and no {_ARGUMENTS[mode]}_batch_size was given to the TPUEstimator."
            )
        return super()._input(input_fn, mode)

    def _hardware(self) -> dict[str, Any]:
        if not self.use_tpu:
            return {}
        return {"accelerator": "tpu", "devices": self.config.tpu_config.num_shards or "auto"}

    def _trainer(self, callbacks: list[Any], saves: bool = True, **arguments: Any) -> Trainer:
        compiled = {**self._hardware(), **self.config.trainer}.get("accelerator") in ("tpu", "xla")
        steps = {"iterations_per_loop": self.config.tpu_config.iterations_per_loop} if compiled else {}
        return super()._trainer(callbacks, saves, **steps, **arguments)

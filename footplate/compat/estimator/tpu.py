"""`TPUEstimator`: an Estimator with batch sizes, and several steps in one call of the compiled program."""

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
    """An Estimator for TPUs: it has batch sizes, and makes several steps in one call of the compiled program.

    `params["batch_size"]` of `input_fn` and `model_fn` is the batch size of the mode, for all devices together; in
    `model_fn`, it is None if no size was given. `features` has the rows of one device.

    Args:
        model_fn: see `Estimator`.
        model_dir: see `Estimator`.
        config: its `tpu_config` has `iterations_per_loop` and `num_shards`.
        params: without `batch_size`.
        use_tpu: False trains on the device of `accelerator="auto"`.
        train_batch_size: the number of rows of a training batch.
        eval_batch_size: the number of rows of an evaluation batch.
        predict_batch_size: the number of rows of a prediction batch.
        warm_start_from: see `Estimator`.

    Examples:
        >>> from footplate.compat.estimator import TPUEstimator
        >>> estimator = TPUEstimator(model_fn, "runs/tpu", params={"lr": 0.1}, use_tpu=False, train_batch_size=4)
        >>> estimator.train(input_fn, max_steps=8).global_step
        8
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
            raise ConfigError(
                'params["batch_size"] is set by the TPUEstimator. Leave it out, and give train_batch_size=…, '
                "eval_batch_size=… or predict_batch_size=…."
            )
        self.use_tpu = use_tpu
        sizes = (train_batch_size, eval_batch_size, predict_batch_size)
        self._batch_sizes = dict(zip(_ARGUMENTS, sizes, strict=True))
        super().__init__(model_fn, model_dir, config, params, warm_start_from)

    def _params_of(self, mode: str) -> dict[str, Any]:
        return {**self.params, "batch_size": self._batch_sizes[mode]}

    def _input(self, input_fn: InputFn, mode: str) -> Any:
        if self._batch_sizes[mode] is None and takes_params(input_fn):
            raise ConfigError(
                f"input_fn takes params, and the TPUEstimator has no {_ARGUMENTS[mode]}_batch_size. Give one."
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

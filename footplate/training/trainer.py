"""The trainer: runs a module over batches, and records the results.

    table → loader → batch → step (forward, backward, optimizer) → metrics → loggers, callbacks, checkpoints

`Trainer` is the front, with Lightning's names. Each call makes a `Run` (`training/run.py`) and passes it to the code that
does the work. Read on with `training/calls.py` for the way of a call to its run, `training/fitting.py` for the set-up of a
`fit`, `training/loop.py` for its epochs and steps, and `training/evaluation_calls.py` for the other calls.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from footplate.core import rng
from footplate.tracking.silent import Silent
from footplate.training import job
from footplate.training.argument_checks import set_deterministic
from footplate.training.calls import evaluate, fit, predict
from footplate.training.config import TrainerConfig, configured
from footplate.training.placement import place
from footplate.training.prepare import choose_callbacks, choose_loggers, our_strategy, record_with, refuse_arguments
from footplate.training.profiling import make_profiler
from footplate.training.reports import Reports
from footplate.training.run import Run
from footplate.training.trainer_attributes import TrainerAttributes
from footplate.training.trainer_services import TrainerServices


class Trainer(TrainerAttributes, TrainerServices):
    """Trains a `Module` (or a `LightningModule`), evaluates it, and predicts with it.

    Args: the fields of `TrainerConfig`, by name. Lightning's other arguments are refused, with what to use instead.

    Attributes:
        module: the module that runs, or that ran last.
        should_stop: set it to end training after this step.
        callbacks: you may change the list between two calls.
        loggers: you may change the list between two calls.

    Raises:
        ConfigError: an argument that can't be used. The error names it and tells what to write instead.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=2, precision="bf16-mixed", default_root_dir="runs/first")
        >>> trainer.fit(model, train, val, ckpt_path="last")  # starts the run, or continues it
        >>> trainer.global_step == 2 * len(train)
        True
    """

    @configured(TrainerConfig, refuse_arguments)
    def __init__(self, config: TrainerConfig) -> None:
        config = replace(config, strategy=our_strategy(config.strategy))
        placement = place(config)
        directory = config.default_root_dir or job.directory()
        run_dir = Path(directory or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S-%f")).expanduser()
        set_deterministic(config.deterministic)
        if config.benchmark is not None:
            torch.backends.cudnn.benchmark = config.benchmark

        self.loggers: list[Any] = choose_loggers(config.logger)
        recorders = record_with(self.loggers)
        if config.fast_dev_run or placement.world.rank != 0:
            self.loggers = [Silent() for _ in self.loggers]
        self.run = Run(
            trainer=self,
            config=config.with_dry_run(),
            placement=placement,
            seed=rng.default_seed() if config.seed is None else config.seed,
            run_dir=run_dir,
            recorders=recorders,
            profiler=make_profiler(config.profiler),
            reports=Reports(recorders),
        )
        self.own_callbacks = choose_callbacks(config)
        self.show_callbacks(self.own_callbacks)
        # The checkpoint that the last call loaded, or that the user assigned.
        self.ckpt_path: str | Path | None = None
        self.shown_ckpt_path: str | None = None
        self.assigned_ckpt_path: str | Path | None = None

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train.

        Args:
            model: a `Module` or a `LightningModule`. `torch.compile(module)` trains it compiled.
            train_dataloaders: a loader, a collection of loaders, or a `DataModule`.
            val_dataloaders: a loader or several.
            datamodule: a `DataModule` or a `LightningDataModule`.
            ckpt_path: continue from this checkpoint, a path or a URI. "last" continues from the newest complete one of
                this run, or starts from the beginning if there is none. "best" continues from the best.
            weights_only: accepted for compatibility. No code of a checkpoint is ever executed.

        Raises:
            FootplateError: a mistake that the user can fix, before training begins if possible.
            SystemExit: 143, after SIGTERM. The step was finished and the run saved.
            KeyboardInterrupt: after SIGINT, likewise. A second SIGINT stops at once.
        """
        fit(self, model, train_dataloaders, val_dataloaders, datamodule, ckpt_path)

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run `validation_step` over the validation loaders.

        Args:
            model: by default the module that was trained last, with its best weights if they were kept.
            dataloaders: a loader, several, or a `DataModule`.
            ckpt_path: load these weights first: "best", "last" or a path.
            verbose: print the results.
            datamodule: a `DataModule`.
            weights_only: see `fit`.

        Returns:
            One dict of metrics for each loader.
        """
        return evaluate(self, "validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run `test_step` over the test loaders; see `validate`."""
        return evaluate(self, "test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        output: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Run `predict_step` over the prediction loaders.

        Args:
            model: see `validate`.
            dataloaders: a loader, several, or a `DataModule`.
            datamodule: a `DataModule`.
            return_predictions: keep and return the outputs of `predict_step`. Default: True without `output`. The objects
                themselves are kept, as under Lightning: if `predict_step` fills a tensor that it uses again, return a copy
                (`.clone()`).
            ckpt_path: see `validate`.
            output: a directory: write the predictions as a Parquet table, batch by batch. `predict_step` then returns a
                tensor or a dict of tensors or lists, whose first dimension is the batch.
            weights_only: see `fit`.

        Returns:
            The predictions, a list for each loader (one list if there is one loader). With `output` and without
            `return_predictions`, the `Table`.
        """
        keep = output is None if return_predictions is None else return_predictions
        return predict(self, model, dataloaders, datamodule, keep, ckpt_path, output)

    def show_callbacks(self, callbacks: list[Any]) -> None:
        """Set `callbacks`, and remember the list, so that changes by the user are noticed."""
        self.callbacks, self.shown_callbacks, self.run.callbacks = list(callbacks), list(callbacks), list(callbacks)

    def _repr_html_(self) -> str:
        from footplate.training.trainer_html import to_html

        return to_html(self.run)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        """Return the trainer itself: a copy of a module still belongs to this trainer."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None: a trainer belongs to its process."""
        return _no_trainer, ()


def _no_trainer() -> None:
    """Return None, in place of a pickled trainer in another process."""

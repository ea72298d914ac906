"""The program of a run, rebuilt to train a part of the run again, without a trace in the run's directory.

A run of `footplate fit` is rebuilt from its configuration. Delta tables that the configuration names without a version are
opened at the version that the run read. A script rebuilds its run itself, and passes trainer, model and loaders.

Training runs in a temporary directory, with silent loggers and without the callbacks that save. Everything else is as in
the run: its seed, validations, schedulers and callbacks may all decide how it continues.
"""

from __future__ import annotations

import pkgutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from footplate.callbacks import Callback
from footplate.checkpoint.storage import Place
from footplate.core.errors import ConfigError
from footplate.data.sources.delta_versions import pinned
from footplate.replaying.recorded_run import Saved
from footplate.tracking.silent import Silent
from footplate.training.argument_checks import as_list
from footplate.training.profiling import NoProfiler
from footplate.training.trainer import Trainer

# Rebuilds a run of `footplate fit` from its directory. The command line is a layer above this one.
REBUILD = "footplate.cli.rebuilding:rebuild"


class Retraining(Callback):
    """The base of callbacks for a part of a run that is trained again.

    Args:
        initial: a hash of the weights that the run began with; empty if it isn't known.
    """

    saves_nothing = True

    def __init__(self, initial: str) -> None:
        self.initial = initial

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Check the weights, if training begins at the beginning of the run.

        Raises:
            ConfigError: they are others than those of the run.
        """
        if trainer.progress.batches or not self.initial:
            return
        own = trainer.run.state.steps.initial
        if own and own != self.initial:
            raise ConfigError(
                "There is no checkpoint before this step, so training begins with new weights, and these are others than "
                "those that the run began with. Seed them before the model is made, as in the run "
                "(fp.seed_everything(…)), and pass a model that hasn't been trained."
            )


def end_here(trainer: Any) -> None:
    """Let training end after this step. All ranks call this at the same batch."""
    trainer.max_steps = trainer.global_step
    trainer.min_epochs = trainer.min_steps = None


@dataclass(frozen=True)
class Program:
    """The program of a run: what it passes to `Trainer` and to `Trainer.fit`.

    Attributes:
        settings: the arguments of the trainer.
        model: see `Trainer.fit`; the others likewise.
    """

    settings: dict[str, Any]
    model: Any
    train_dataloaders: Any
    val_dataloaders: Any
    datamodule: Any

    def train(
        self,
        callbacks: Sequence[Callback],
        start: Saved | None,
        seed: int,
        check: Callable[[Trainer], None] = lambda trainer: None,
    ) -> Trainer:
        """Train until a callback calls `end_here`; return the trainer.

        Args:
            callbacks: called before those of the run, or late if their `order` says so. One of them `saves_nothing`.
            start: the checkpoint to begin from; None for the beginning of the run.
            seed: the run's seed.
            check: called with the trainer before it trains.
        """
        changed: dict[str, Any] = {
            "callbacks": [*callbacks, *as_list(self.settings.get("callbacks"))],
            "logger": Silent(),
            "seed": seed,
            "enable_model_summary": False,
            "enable_monitor": False,
            "profiler": NoProfiler(final=True),
            "max_time": None,
            "max_restarts": 0,
            "max_host_restarts": 0,
            "min_devices": None,
        }
        path: Any = None if start is None else start.path
        with tempfile.TemporaryDirectory(prefix="footplate-replay-") as directory:
            trainer = Trainer(**{**self.settings, **changed, "default_root_dir": directory})
            check(trainer)
            trainer.fit(self.model, self.train_dataloaders, self.val_dataloaders, self.datamodule, ckpt_path=path)
        return trainer


@contextmanager
def rebuilt(
    run: str | Place,
    newest: dict[str, Any],
    trainer: Trainer | None,
    model: Any,
    train_dataloaders: Any,
    val_dataloaders: Any,
    datamodule: Any,
) -> Iterator[Program]:
    """Rebuild the program of a run, for a `with` block in which it trains.

    Args:
        run: the run's directory, or one of its checkpoints.
        newest: the state of its newest checkpoint, without tensors.
        trainer: a trainer with the arguments of the run; None for the defaults, or for a run of `footplate fit`.
        model: the model as the script passes it to `Trainer.fit`; None for a run of `footplate fit`.
        train_dataloaders: see `Trainer.fit`.
        val_dataloaders: see `Trainer.fit`.
        datamodule: see `Trainer.fit`.

    Raises:
        ConfigError: there is no model, and the run wasn't made by `footplate fit`.
    """
    with pinned(_versions(newest)):
        if model is None and trainer is not None:
            raise ConfigError(
                "There is a trainer and no model: pass everything that your script passes to trainer.fit()."
            )
        if model is None:
            yield Program(*_rebuild(run))
        else:
            settings = {} if trainer is None else _settings(trainer)
            yield Program(settings, model, train_dataloaders, val_dataloaders, datamodule)


def _rebuild(run: str | Place) -> tuple[dict[str, Any], Any, None, None, Any]:
    settings, model, datamodule = pkgutil.resolve_name(REBUILD)(run)
    return settings, model, None, None, datamodule


def ranks_of(trainer: Trainer) -> int:
    """Return the number of ranks with which a trainer trains."""
    return trainer.ranks_asked if trainer.run.placement.starts_ranks else trainer.world.size


def _versions(outline: dict[str, Any]) -> dict[str, int]:
    """Return the version of each Delta table that the run trained on, by its address, if it is the same for all epochs."""
    versions: dict[str, set[int]] = {}
    for loader in outline.get("steps", {}).get("loaders", []):
        for part in loader.get("parts", [loader]):
            table = part.get("table", {})
            if table.get("source") and table["digest"]["version"] is not None:
                versions.setdefault(table["source"], set()).add(table["digest"]["version"])
    return {source: numbers.pop() for source, numbers in versions.items() if len(numbers) == 1}


def _settings(trainer: Trainer) -> dict[str, Any]:
    """Return the arguments of a trainer, with callbacks that were added to its list."""
    config = trainer.run.config
    own = {id(callback) for callback in trainer.own_callbacks}
    added = [callback for callback in trainer.callbacks if id(callback) not in own]
    return {**vars(config), "callbacks": [*as_list(config.callbacks), *added]}

"""`Tuner`: the searches, with a trainer's settings. `footplate/training/tuner/__init__.py` shows how to use it."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from footplate.core.errors import ConfigError
from footplate.training.loaders import LOADERS
from footplate.training.out_of_memory import is_out_of_memory
from footplate.training.prepare import split_datamodule
from footplate.training.tuner.batch_size import largest, most_rows
from footplate.training.tuner.lr_finder import LRFinder, RisingRate
from footplate.training.tuner.trial import trial

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

log = logging.getLogger(__name__)

Method = Literal["fit", "validate", "test", "predict"]


class Tuner:
    """Searches for a learning rate and a batch size with a trainer's settings.

    Args:
        trainer: the trainer whose settings a search uses. It is not changed.

    Examples:
        >>> tuner = fp.Tuner(fp.Trainer(max_epochs=1))
        >>> finder = tuner.lr_find(model, train, num_training=20)  # sets model.lr
        >>> finder.suggestion() == model.lr
        True
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: Method = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LRFinder | None:
        """Train a copy of the model with a learning rate that rises at each step, and record the losses.

        Args:
            model: see `Trainer.fit`.
            train_dataloaders: see `Trainer.fit`.
            val_dataloaders: accepted for compatibility. A search doesn't validate.
            dataloaders: accepted for compatibility. Must be None.
            datamodule: see `Trainer.fit`.
            method: "fit".
            min_lr: the learning rate of the first step.
            max_lr: the learning rate of the last step.
            num_training: the number of steps.
            mode: how the learning rate rises.
            early_stop_threshold: stop when the smoothed loss exceeds this multiple of the best loss. None never stops.
            update_attr: set the model's attribute to the suggestion.
            attr_name: the attribute. By default "lr" or "learning_rate", of the model or its `hparams`.

        Returns:
            The result. None with `fast_dev_run`.

        Raises:
            ConfigError: several optimizers, manual optimisation, or no such attribute.
        """
        if method != "fit" or dataloaders is not None:
            raise ConfigError(
                f'lr_find(method="{method}"): a learning rate is for method="fit", with train_dataloaders.'
            )
        if mode not in ("exponential", "linear"):
            raise ConfigError(f'lr_find(mode="{mode}"): expected "exponential" or "linear".')
        if self._trainer.fast_dev_run:
            log.warning("fast_dev_run: the search for a learning rate is skipped.")
            return None
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)

        name = attr_name or next(
            (candidate for candidate in ("lr", "learning_rate") if holders(model, datamodule, candidate)), ""
        )
        if update_attr and not (name and holders(model, datamodule, name)):
            raise ConfigError(
                f"lr_find(): {type(model).__name__} has no {attr_name or 'lr or learning_rate'}, neither as an attribute "
                "nor in its hparams. Give the name of its attribute (attr_name=…), or use update_attr=False."
            )

        finder = LRFinder(mode, min_lr, max_lr, num_training)
        probe = RisingRate(finder, early_stop_threshold)
        limits = {"max_steps": num_training, "limit_val_batches": 0}
        with trial(self._trainer, model, datamodule, train_dataloaders, limits, probe) as (
            trainer_copy,
            copied,
            loaders,
        ):
            trainer_copy.fit(copied, loaders, datamodule=datamodule)
        finder.results = {"lr": probe.rates, "loss": probe.losses}
        if len(probe.losses) < num_training:
            log.info("The search ended after %d of %d steps.", len(probe.losses), num_training)

        suggested = finder.suggestion() if update_attr else None
        if suggested is not None:
            _set(model, datamodule, name, suggested)
            log.info("%s.%s is %g now.", type(model).__name__, name, suggested)
        return finder

    def scale_batch_size(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: Method = "fit",
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Find the largest batch size whose steps fit into memory, and set the attribute to it.

        Args:
            model: see `Trainer.fit`. It or the data module makes the loaders, with the attribute as their batch size.
            train_dataloaders: a data module may be given here.
            val_dataloaders: accepted for compatibility. Must be None.
            dataloaders: for a method other than "fit", a data module may be given here.
            datamodule: see `Trainer.fit`.
            method: "fit", "validate", "test" or "predict".
            mode: "power" doubles until a batch doesn't fit. "binsearch" then searches between the last two sizes.
            steps_per_trial: the number of steps to try with each size.
            init_val: the first size.
            max_trials: stop after this many sizes that fit. 0 takes `init_val` without a trial.
            batch_arg_name: the attribute, of the model, its `hparams` or the data module.
            margin: with "binsearch", subtract this share of the result.
            max_val: the largest size to try.

        Returns:
            The size. None with `fast_dev_run`.

        Raises:
            ConfigError: several ranks, loaders in the place of hooks, no such attribute, or a batch of one row that
                doesn't fit.
        """
        _check_search(mode, method, margin)
        if self._trainer.fast_dev_run:
            log.warning("fast_dev_run: the search for a batch size is skipped.")
            return None
        if self._trainer.ranks_asked > 1 or self._trainer.world.size > 1:
            raise ConfigError("scale_batch_size(): the trainer has several ranks. Search with Trainer(devices=1).")
        loaders, datamodule = split_datamodule(train_dataloaders if method == "fit" else dataloaders, datamodule)
        _check_made_by_hooks((loaders, val_dataloaders), method, batch_arg_name)
        if not holders(model, datamodule, batch_arg_name):
            raise ConfigError(
                f"scale_batch_size(): {type(model).__name__} has no attribute {batch_arg_name}, nor have its hparams or "
                "the data module. Give the name of yours (batch_arg_name=…)."
            )

        limits = {"max_steps": steps_per_trial} if method == "fit" else {}
        limits |= {f"limit_{name}_batches": steps_per_trial for name in LOADERS.values()} | {"limit_train_batches": 1.0}
        rows = math.inf

        def fits(size: int) -> bool:
            nonlocal rows
            try:
                with trial(self._trainer, model, datamodule, None, limits) as (trainer_copy, copied, _):
                    _set(copied, datamodule, batch_arg_name, size)
                    getattr(trainer_copy, method)(copied, datamodule=datamodule)
                    rows = most_rows(trainer_copy.dataloaders.get(LOADERS.get(method, "train")))
                log.info("A batch of %d fits.", size)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                log.info("A batch of %d doesn't fit.", size)
                return False
            finally:
                gc.collect()
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()
            return True

        size = largest(fits, lambda: rows, init_val, mode == "binsearch", max_trials, max_val)
        if size is None:
            raise ConfigError("scale_batch_size(): not even a batch of one row fits into memory.")
        if mode == "binsearch":
            size = max(1, int(size * (1 - margin)))
        _set(model, datamodule, batch_arg_name, size)
        return size


def _check_search(mode: str, method: str, margin: float) -> None:
    """Refuse invalid choices for a search for the batch size."""
    if mode not in ("power", "binsearch"):
        raise ConfigError(f'scale_batch_size(mode="{mode}"): expected "power" or "binsearch".')
    if method != "fit" and method not in LOADERS:
        raise ConfigError(f'scale_batch_size(method="{method}"): expected "fit", "validate", "test" or "predict".')
    if not 0.0 <= margin < 1.0:
        raise ConfigError(f"scale_batch_size(margin={margin}): expected 0 or more and less than 1.")


def _check_made_by_hooks(loaders: tuple[Any, Any], method: str, name: str) -> None:
    """Refuse a search with these loaders, if there are any: it can change the batch size only of those that hooks make."""
    hook = f"{LOADERS.get(method, 'train')}_dataloader"
    if any(loader is not None for loader in loaders):
        raise ConfigError(
            f"scale_batch_size(): loaders that are made already have their batch size. Define {hook}() in the model "
            f"or in a data module, with self.{name} as the batch size."
        )


def holders(model: Any, datamodule: Any, name: str) -> list[Any]:
    """Return the objects that have an attribute (or a key) of that name: model, data module, and their `hparams`."""
    owners = [owner for owner in (model, datamodule) if owner is not None]
    owning = [owner for owner in owners if hasattr(owner, name)]
    for owner in owners:
        hparams = getattr(owner, "hparams", None)
        if hparams is not None and (name in hparams if isinstance(hparams, Mapping) else hasattr(hparams, name)):
            owning.append(hparams)
    return owning


def _set(model: Any, datamodule: Any, name: str, value: Any) -> None:
    for holder in holders(model, datamodule, name):
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)

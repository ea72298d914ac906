"""Searches before training: a learning rate, and the largest batch that fits into memory.

    tuner = fp.Tuner(trainer)
    tuner.scale_batch_size(model, datamodule=data)      # sets data.batch_size (or model.batch_size)
    tuner.lr_find(model, datamodule=data)               # sets model.lr (or model.learning_rate)
    trainer.fit(model, datamodule=data)

A search trains a copy of the model with a trainer of its own, in a directory that is deleted afterwards. So it leaves the
model, your trainer, the loaders and the global random generators as they were, and `fit` after a search is bit for bit
`fit` without one, with the same learning rate and batch size. Only the attribute that it sets differs.

What it can't put back: what your data set's own code keeps in memory, and what hooks write outside the model.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from footplate.callbacks.base import Callback
from footplate.core import rng
from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides
from footplate.data.adapters.combined import CombinedLoader, flatten, holds_loaders, is_combined, leaves_of, mode_of
from footplate.training.loaders import LOADERS
from footplate.training.prepare import split_datamodule

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

log = logging.getLogger(__name__)

Method = Literal["fit", "validate", "test", "predict"]

_SMOOTHING = 0.98


class LRFinder:
    """What `Tuner.lr_find` has found.

    Attributes:
        results: "lr" and "loss" (smoothed) of each step.
        mode: as given.
        lr_min: as given.
        lr_max: as given.
        num_training: as given.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode = mode
        self.lr_min = lr_min
        self.lr_max = lr_max
        self.num_training = num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._optimal_idx: int | None = None

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        part = (step + 1) / self.num_training if step else 0.0
        if self.mode == "linear":
            return self.lr_min + part * (self.lr_max - self.lr_min)
        return self.lr_min * (self.lr_max / self.lr_min) ** part

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The learning rate at which the loss falls most steeply; None where fewer than two losses are left.

        Args:
            skip_begin: leave out so many of the first losses.
            skip_end: leave out so many of the last losses.
        """
        stop = len(self.results["loss"]) - skip_end
        steps = [step for step in range(skip_begin, stop) if math.isfinite(self.results["loss"][step])]
        if len(steps) < 2:
            log.error(
                "There are too few losses to suggest a learning rate: %d. Use a larger num_training, or more data.",
                len(steps),
            )
            self._optimal_idx = None
            return None
        losses, rates = (torch.tensor([self.results[name][step] for step in steps]) for name in ("loss", "lr"))
        slopes = torch.gradient(losses, spacing=[rates])[0]
        self._optimal_idx = steps[int(slopes.argmin())]
        return self.results["lr"][self._optimal_idx]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """A figure of the losses over the learning rates; needs matplotlib.

        Args:
            suggest: mark the suggestion.
            show: show the figure.
            ax: the matplotlib axes to draw into; by default those of a new figure.
        """
        import matplotlib.pyplot as plt

        figure, ax = plt.subplots() if ax is None else (ax.figure, ax)
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest and self.suggestion() is not None and self._optimal_idx is not None:
            point = [self.results[name][self._optimal_idx] for name in ("lr", "loss")]
            ax.plot(*point, markersize=10, marker="o", color="red")
        if show:
            plt.show()
        return figure


class Tuner:
    """Searches with a trainer's settings; see the module's docstring.

    Args:
        trainer: whose settings the search uses. It is left as it is.
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
        """Train a copy with a learning rate that rises at each step, and note the losses.

        Args:
            model: see `Trainer.fit`.
            train_dataloaders: likewise.
            val_dataloaders: accepted for Lightning's sake: a search doesn't validate.
            dataloaders: accepted for Lightning's sake: must be None.
            datamodule: see `Trainer.fit`.
            method: "fit".
            min_lr: of the first step.
            max_lr: of the last step.
            num_training: how many steps.
            mode: how the learning rate rises.
            early_stop_threshold: end when the smoothed loss exceeds so many times the best; None never does.
            update_attr: set the model's attribute to the suggestion.
            attr_name: its name; by default "lr" or "learning_rate", of the model or its `hparams`.

        Returns:
            What was found; None with `fast_dev_run`.

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
        name = attr_name or next((one for one in ("lr", "learning_rate") if holders(model, datamodule, one)), "")
        if update_attr and not (name and holders(model, datamodule, name)):
            raise ConfigError(
                f"lr_find(): {type(model).__name__} has no {attr_name or 'lr or learning_rate'}, neither as an attribute "
                "nor in its hparams. Give the name of its attribute (attr_name=…), or use update_attr=False."
            )
        finder = LRFinder(mode, min_lr, max_lr, num_training)
        probe = _Rises(finder, early_stop_threshold)
        limits = {"max_steps": num_training, "limit_val_batches": 0}
        with _scout(self._trainer, model, datamodule, train_dataloaders, limits, probe) as (scout, copied, loaders):
            scout.fit(copied, loaders, datamodule=datamodule)
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
            train_dataloaders: a data module, in its place.
            val_dataloaders: accepted for Lightning's sake: must be None.
            dataloaders: for another method than "fit", a data module in its place.
            datamodule: see `Trainer.fit`.
            method: "fit", "validate", "test" or "predict".
            mode: "power" doubles until a batch doesn't fit; "binsearch" then narrows it down.
            steps_per_trial: how many steps are tried with each size.
            init_val: the first size.
            max_trials: end after so many sizes that fit; 0 takes `init_val` without a try.
            batch_arg_name: the attribute, of the model, its `hparams` or the data module.
            margin: with "binsearch", take such a part less than what was found.
            max_val: the largest size that is tried.

        Returns:
            The size; None with `fast_dev_run`.

        Raises:
            ConfigError: several ranks, loaders in the place of hooks, no such attribute, or a batch of one row that
                doesn't fit.
        """
        if mode not in ("power", "binsearch"):
            raise ConfigError(f'scale_batch_size(mode="{mode}"): expected "power" or "binsearch".')
        if method != "fit" and method not in LOADERS:
            raise ConfigError(f'scale_batch_size(method="{method}"): expected "fit", "validate", "test" or "predict".')
        if not 0.0 <= margin < 1.0:
            raise ConfigError(f"scale_batch_size(margin={margin}): expected 0 or more and less than 1.")
        if self._trainer.fast_dev_run:
            log.warning("fast_dev_run: the search for a batch size is skipped.")
            return None
        if self._trainer.ranks_asked > 1 or self._trainer.world.size > 1:
            raise ConfigError("scale_batch_size(): the trainer has several ranks. Search with Trainer(devices=1).")
        given, datamodule = split_datamodule(train_dataloaders if method == "fit" else dataloaders, datamodule)
        hook = f"{LOADERS.get(method, 'train')}_dataloader"
        if given is not None or val_dataloaders is not None:
            raise ConfigError(
                f"scale_batch_size(): loaders that are made already have their batch size. Define {hook}() in the model "
                f"or in a data module, with self.{batch_arg_name} as the batch size."
            )
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
                with _scout(self._trainer, model, datamodule, None, limits) as (scout, copied, _):
                    _set(copied, datamodule, batch_arg_name, size)
                    getattr(scout, method)(copied, datamodule=datamodule)
                    rows = _rows(scout.dataloaders.get(LOADERS.get(method, "train")))
                log.info("A batch of %d fits.", size)
            except RuntimeError as error:
                if not out_of_memory(error):
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


def largest(
    fits: Callable[[int], bool], rows: Callable[[], float], first: int, narrow: bool, trials: int, most: int
) -> int | None:
    """The largest batch size that was tried and fits; None where none does.

    Args:
        fits: tries a size.
        rows: how many rows there are, once a size has been tried; a larger batch than that says nothing.
        first: the first size, which is doubled.
        narrow: look between the largest that fits and the smallest that doesn't.
        trials: end after so many sizes that fit; 0 takes the first without a try.
        most: the largest size to try.
    """
    if trials == 0:
        return first
    best, failed, size = 0, most + 1, min(first, most)
    while trials and best < size < failed:
        if fits(size):
            best, trials = size, trials - 1
            if best >= rows():
                break
        else:
            failed = size
        unknown = failed > most
        if best and not unknown and not narrow:
            break
        size = min(2 * size, most) if unknown else (best + failed) // 2
    return best or None


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the memory of a device, or of the host, is exhausted."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(
        all(word in said for word in words)
        for words in (
            ("CUDA", "out of memory"),
            ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",),
            ("DefaultCPUAllocator: can't allocate memory",),
            ("MPS backend out of memory",),
            ("RESOURCE_EXHAUSTED",),
        )
    )


def holders(model: Any, datamodule: Any, name: str) -> list[Any]:
    """What has an attribute (or a key) of that name: the model, its `hparams`, the data module and its `hparams`."""
    owners = [owner for owner in (model, datamodule) if owner is not None]
    found = [owner for owner in owners if hasattr(owner, name)]
    for owner in owners:
        hparams = getattr(owner, "hparams", None)
        if hparams is not None and (name in hparams if isinstance(hparams, Mapping) else hasattr(hparams, name)):
            found.append(hparams)
    return found


def _set(model: Any, datamodule: Any, name: str, value: Any) -> None:
    for holder in holders(model, datamodule, name):
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)


def _rows(loaders: Any) -> float:
    """How many rows a batch can have at most, of the loaders that were used."""
    found = []
    for loader in leaves_of(loaders):
        rows = getattr(loader, "table", None)
        try:
            found.append(rows.num_rows if rows is not None else len(loader.dataset))
        except (AttributeError, TypeError, NotImplementedError):
            continue
    return max(found, default=math.inf)


class _Rises(Callback):
    """Sets the learning rate of each step, notes the losses, and ends training when they diverge."""

    sees_weights = False

    def __init__(self, finder: LRFinder, threshold: float | None) -> None:
        self._finder, self._threshold = finder, threshold
        self._average = self._best = 0.0
        self._batches = 0
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise ConfigError(
                f"lr_find(): {type(pl_module).__name__} has {len(trainer.optimizers)} optimizer(s)"
                f"{'' if pl_module.automatic_optimization else ' and optimises by hand'}: expected one, with automatic "
                "optimisation."
            )
        own = {id(parameter) for parameter in pl_module.parameters()}
        if any(id(one) not in own for group in trainer.optimizers[0].param_groups for one in group["params"]):
            raise ConfigError(
                "lr_find(): configure_optimizers() gives an optimizer of parameters that aren't those of self, so that the "
                "search would change the model. Use self.parameters() there."
            )
        trainer.replace_schedulers([])

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rate = self._finder.rate(trainer.global_step)
        for group in trainer.optimizers[0].param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        if self._batches >= self._finder.num_training * trainer.accumulate_grad_batches:
            trainer.should_stop = True  # also where steps were skipped, which don't count
        step = trainer.global_step
        if step == len(self.rates):
            return  # inside an accumulation window
        self.rates.append(self._finder.rate(step - 1))
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is None:
            self.losses.append(math.nan)
            return
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * float(loss)
        smoothed = self._average / (1 - _SMOOTHING ** (step + 1))
        if self._threshold is not None and step > 1 and smoothed > self._threshold * self._best:
            trainer.should_stop = True
        if step == 1 or smoothed < self._best:
            self._best = smoothed
        self.losses.append(smoothed)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.rates, self.losses = trainer.group.from_first((self.rates, self.losses))


@contextlib.contextmanager
def _scout(
    trainer: Trainer, model: Any, datamodule: Any, loaders: Any, limits: dict[str, Any], *callbacks: Callback
) -> Iterator[tuple[Trainer, Any, Any]]:
    """A trainer with the same settings, a copy of the model, and loaders with places of their own. Afterwards all is as it
    was before.
    """
    from footplate.training.trainer import Trainer

    directory = tempfile.mkdtemp(prefix="footplate-search-")
    config = replace(
        trainer.config, callbacks=list(callbacks), logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=-1, min_epochs=None, min_steps=None, max_time=None, val_check_interval=None,
        check_val_every_n_epoch=1, num_sanity_val_steps=0, profiler=None, seed=trainer.seed, default_root_dir=directory,
        **limits,
    )  # fmt: skip
    with contextlib.ExitStack() as held:
        held.callback(shutil.rmtree, directory, ignore_errors=True)
        held.enter_context(_as_before(model, datamodule, loaders))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the trainer has said them
            scout = Trainer(**vars(config))
        scout.run.launch_id = "search"  # no fit of the job, which counts those
        yield scout, _copied(model), _apart(loaders)


@contextlib.contextmanager
def _as_before(model: Any, datamodule: Any, loaders: Any) -> Iterator[None]:
    """Put back what training changes besides the model's copy: random generators, the data module, samplers; and leave the
    device's memory to the copy.
    """
    generators = rng.capture()
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    fields = None if datamodule is None else dict(vars(datamodule))
    hparams = copy.copy(getattr(datamodule, "hparams", None))
    samplers = [_state_of(sampler) for sampler in _samplers(loaders)]
    devices = [
        (tensor, tensor.device) for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "cpu"
    ]
    for tensor, _ in devices:
        tensor.data = tensor.data.cpu()
    try:
        yield
    finally:
        for tensor, device in devices:
            tensor.data = tensor.data.to(device)
        for put_back in samplers:
            put_back()
        if fields is not None:
            vars(datamodule).clear()
            vars(datamodule).update(fields)
        if isinstance(hparams, dict) and datamodule is not None:
            datamodule.hparams.clear()
            datamodule.hparams.update(hparams)
        rng.restore(generators)
        if on_cuda is not None:
            torch.cuda.set_rng_state_all(on_cuda)


def _copied(model: Any) -> Any:
    """A copy of the model, without the callbacks that it asks for.

    Raises:
        ConfigError: it can't be copied.
    """
    try:
        copied = copy.deepcopy(model)
    except Exception as error:  # whatever a part of the user's raises
        raise ConfigError(
            f"{type(model).__name__} can't be copied ({error}), so that a search can't leave it as it is. A tensor that "
            "depends on others, a lock or an open file as an attribute can't be."
        ) from error
    if overrides(copied, "configure_callbacks"):
        copied.configure_callbacks = list
    return copied


def _apart(loaders: Any) -> Any:
    """Loaders with places of their own, in the same collection.

    Raises:
        ConfigError: an iterator, which a search would use up.
    """
    if loaders is None:
        return None
    leaves, build = flatten(loaders) if holds_loaders(loaders) else ([loaders], next)
    for leaf in leaves:
        if isinstance(leaf, Iterator):
            raise ConfigError(f"A search would use up the {type(leaf).__name__} that was given: give what makes it.")
    built = build(iter([leaf.beside() if hasattr(leaf, "beside") else leaf for leaf in leaves]))
    return CombinedLoader(built, mode_of(loaders, "max_size_cycle")) if is_combined(loaders) else built


def _samplers(loaders: Any) -> list[Any]:
    """The samplers and generators of torch DataLoaders, which an epoch changes."""
    found: list[Any] = []
    for loader in leaves_of(loaders) if holds_loaders(loaders) else [loaders]:
        batch_sampler = getattr(loader, "batch_sampler", None)
        for owner in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
            generator = getattr(owner, "generator", None)
            found += [] if owner is None or owner is loader else [owner]
            found += [generator] if isinstance(generator, torch.Generator) else []
    return found


def _state_of(sampler: Any) -> Callable[[], Any]:
    """What puts a sampler or generator back to its present state."""
    if isinstance(sampler, torch.Generator):
        state = sampler.get_state()
        return lambda: sampler.set_state(state)
    fields = {}
    for name, value in getattr(sampler, "__dict__", {}).items():
        plain = isinstance(value, (int, float, str, list, dict, set, tuple)) or hasattr(value, "getstate")
        fields[name] = copy.deepcopy(value) if plain else value
    return lambda: getattr(sampler, "__dict__", {}).update(fields)

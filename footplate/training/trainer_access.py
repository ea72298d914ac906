"""Access from a module to the trainer that runs it: logging, optimizers, progress."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from footplate.core.errors import ConfigError
from footplate.distributed.replica_logs import Logged

if TYPE_CHECKING:
    from footplate.tracking.base import Logger
    from footplate.training.trainer import Trainer


class TrainerAccess:
    """Methods of a module that use its trainer.

    The only state is `_trainer`, so the modules of other libraries can use the same methods (`compat`).
    """

    _trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this module."""
        if self._trainer is None:
            raise ConfigError(f"{type(self).__name__} is not attached to a Trainer: call trainer.fit(module) first.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which belongs to no trainer."""
        return {**vars(self), "_trainer": None}

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self._trainer.current_epoch if self._trainer else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps taken so far."""
        return self._trainer.global_step if self._trainer else 0

    @property
    def global_rank(self) -> int:
        """The rank of this process among all, or its logical rank."""
        return self._trainer.global_rank if self._trainer else 0

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self._trainer.world.local_rank if self._trainer else 0

    @property
    def device_mesh(self) -> Any:
        """The grid of the ranks in `configure_model`, with `ModelParallelStrategy`: a `DeviceMesh` with the dimensions
        "data_parallel" and "tensor_parallel". None with any other strategy.
        """
        return self._trainer.parallel.device_mesh if self._trainer else None

    @property
    def logger(self) -> Logger | None:
        """The first logger of the trainer."""
        return self._trainer.logger if self._trainer else None

    @property
    def loggers(self) -> list[Logger]:
        """All loggers of the trainer."""
        return self._trainer.loggers if self._trainer else []

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Tensor], Tensor] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: float | Tensor | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a metric under a name. It costs no device synchronisation: values are read for the next report.

        Args:
            name: the name for callbacks and loggers. A value logged by step and epoch also gets the names `name_step` and
                `name_epoch`.
            value: a number, a one-element tensor, a torchmetrics `Metric`, or a dict of these.
            prog_bar: show it in the progress display.
            logger: send it to the loggers (default: yes).
            on_step: report the latest value every `log_every_n_steps`. Default in `training_step` and in the batch hooks of
                training.
            on_epoch: reduce the values of an epoch with `reduce_fx`. Default in evaluation and in epoch hooks.
            reduce_fx: "mean" (weighted by batch size), "sum", "min", "max", or a function of the stacked values.
            enable_graph: accepted for compatibility. Values are always detached.
            sync_dist: reduce over all ranks too.
            sync_dist_group: the process group to reduce over. By default all ranks.
            add_dataloader_idx: with several evaluation loaders, append `/dataloader_idx_N` to the name.
            batch_size: the weight of this value in the epoch's mean. Default: the first dimension of the batch. For a mean
                over tokens, pass the number of tokens. A tensor on the device costs no synchronisation.
            metric_attribute: accepted for compatibility. Footplate finds metrics itself.
            rank_zero_only: only rank 0 makes this call, so the value is not reduced over ranks.

        Raises:
            ConfigError: the value is not a number, or logging is not possible here.
        """
        trainer = self._trainer
        if trainer is None:
            _warn_unattached(type(self).__name__)
            return
        sync_dist = sync_dist and not rank_zero_only
        trainer.metrics.record(
            Logged(
                name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, batch_size
            )
        )

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log every item; takes the arguments of `log`. A torchmetrics `MetricCollection` is a mapping too."""
        # The members of a MetricCollection share their states; by default `items` would copy these at each call.
        shared = {"copy_state": False} if getattr(dictionary, "_enable_compute_groups", False) else {}
        for name, value in dictionary.items(**shared):
            self.log(name, value, *args, **kwargs)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of them, for manual optimisation. Each `.step()` counts as a global step."""
        optimizers = self.trainer.step_optimizers if use_pl_optimizer else self.trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """Return the learning-rate scheduler, the list of them, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Call `loss.backward()` with the precision's scaling, for manual optimisation."""
        if self.automatic_optimization:  # type: ignore[attr-defined]
            raise ConfigError("manual_backward() needs manual optimisation: set self.automatic_optimization = False.")
        self.trainer.step.backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer's parameters, by norm (default) or value. Without a value, do nothing."""
        if gradient_clip_val is None:
            gradient_clip_val = self.trainer.gradient_clip_val
        algorithm = gradient_clip_algorithm or self.trainer.gradient_clip_algorithm
        self.trainer.step.clip_gradients(optimizer, gradient_clip_val, algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients, until `untoggle_optimizer` or the next toggle."""
        self.untoggle_optimizer(optimizer)
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        groups = [group for other in self.trainer.optimizers for group in other.param_groups]
        others = {p: p.requires_grad for group in groups for p in group["params"] if p not in mine}
        for parameter in others:
            parameter.requires_grad = False
        self.__dict__["_toggled"] = others

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo `toggle_optimizer`."""
        for parameter, required in self.__dict__.pop("_toggled", {}).items():
            parameter.requires_grad = required

    @contextlib.contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Toggle an optimizer for a `with` block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return `data` of every rank, stacked in a new first dimension."""
        return self.trainer.all_gather(data, group, sync_grads)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, without breaking the progress display."""
        if self._trainer is None:
            print(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)


_warned: set[str] = set()


def _warn_unattached(name: str) -> None:
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"{name}.log() has no effect: the module is not attached to a Trainer.", stacklevel=3)

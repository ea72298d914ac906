"""Warnings about silent slowness of a compiled training. Each warning is logged once.

The trainer adds this callback if the accelerator lists it. It checks:

    training begins      packages and environment that don't match, precision               (on a TPU)
                         hooks that fetch the weights at every batch                        (anywhere)
    first report         rows per device, sizes of matrices                                 (on a TPU)
    later reports        waiting for input, after some seconds                              (anywhere)
    training ends        how often each step was compiled, and for which forms of batch     (anywhere)

With several processes, the first process logs the warnings. Warnings about packages and environment are logged by every
process, for its own host. The pure functions of `hardware/tpu/pitfalls.py` decide when to warn, and with which text.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from footplate.callbacks.base import Callback
from footplate.hardware.tpu import pitfalls
from footplate.hardware.tpu.environment import wrong_count
from footplate.hardware.tpu.report import examine_tpu
from footplate.hardware.transfer import batch_rows
from footplate.hardware.xla import XLA, jax, tpu_chips

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView

log = logging.getLogger(__name__)

USUAL_UNIT = 128


def watch(accelerator: XLA) -> Pitfalls:
    """Make the callback. XLA's accelerators name this function in `callbacks`."""
    return Pitfalls(jax().devices()[0].platform, len(tpu_chips()))


class Pitfalls(Callback):
    """Warns about silent slowness; the module's docstring lists the checks.

    Args:
        platform: JAX's name of the devices: "tpu" or "cpu".
        chips: number of TPU chips attached to this machine.
        least_s: how long to measure the wait for input before a warning.

    Attributes:
        told: the warnings logged so far.
    """

    sees_weights = False

    def __init__(self, platform: str, chips: int = 0, least_s: float = 10.0) -> None:
        self.told: list[str] = []
        self._on_tpu, self._chips, self._least_s = platform == "tpu", chips, least_s
        self._unit = USUAL_UNIT
        # True in the first process.
        self._first = True
        self._checked_batch, self._measures = False, True
        # The wait is measured from the second report on, when the first programs have been compiled.
        self._began = False
        # Seconds.
        self._since = self._waited = self._paused_at = self._paused_s = 0.0

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._first = trainer.world.rank == 0
        weight_readers = [
            reader
            for name in ("on_train_batch_start", "on_train_batch_end")
            for reader in trainer.hooks.weight_readers(name)
        ]
        state_bytes = sum(tensor.nbytes for tensor in (*pl_module.parameters(), *pl_module.buffers()))
        self._warn(pitfalls.transfers(weight_readers, state_bytes, trainer.log_every_n_steps))
        if self._on_tpu:
            self._warn(pitfalls.full_precision(trainer.precision.name))
            self._examine()

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.logs_this_step:
            return
        if self._on_tpu and not self._checked_batch:
            self._checked_batch = True
            self._warn(pitfalls.tiny_batches(batch_rows(batch), len(trainer.device_ids)))
            self._warn(_small_products(trainer, self._unit))
        if self._measures:
            self._measure_wait(trainer.data_wait_s)

    def on_validation_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._paused_s += time.perf_counter() - self._paused_at

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        for warning in pitfalls.recompilations(getattr(trainer.step, "compilations", ())):
            self._warn(warning)

    def _measure_wait(self, waited_s: float) -> None:
        if not self._began:
            self._began, self._since, self._waited, self._paused_s = True, time.perf_counter(), waited_s, 0.0
            return
        elapsed_s = time.perf_counter() - self._since - self._paused_s
        if elapsed_s >= self._least_s:
            warning = pitfalls.waiting(waited_s - self._waited, elapsed_s)
            self._measures = warning is None
            self._warn(warning)

    def _examine(self) -> None:
        """Warn about packages, environment and the number of devices, in the doctor's words."""
        import jax

        report = examine_tpu(os.environ, self._chips)
        if report.environment.slice is not None:
            self._unit = report.environment.slice.generation.unit
        for warning in (*report.advice, wrong_count(report.environment, jax.local_device_count())):
            self._warn(warning, of_this_host=True)

    def _warn(self, warning: str | None, of_this_host: bool = False) -> None:
        if warning is not None and warning not in self.told and (self._first or of_this_host):
            self.told.append(warning)
            log.warning("%s", warning)


def _small_products(trainer: TrainerView, unit: int) -> str | None:
    """A warning about the matrix sizes of the training step, or None."""
    from footplate.step.xla.capture.matrix_products import products_of

    steps = [step for step in getattr(trainer.step, "captured", {}).values() if step.trains]
    return pitfalls.small_products(products_of(steps[0].graph), unit) if steps else None

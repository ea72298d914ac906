"""Tells, once each, what makes a compiled training slow without a word.

The trainer adds this callback where the accelerator asks for it. When what is looked at:

    training begins      packages and surroundings that don't fit, precision                (on a TPU)
                         hooks that fetch the weights at every batch                        (anywhere)
    first report         rows for each device, sizes of matrices                            (on a TPU)
    later reports        waiting for input, when some seconds have passed                   (anywhere)
    training ends        how often each step was compiled, and for which forms of batch     (anywhere)

Of several processes the first one tells; of packages and surroundings, each tells its own. What is said, and when nothing
is, are the pure functions of `hardware/tpu/pitfalls.py`.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from footplate.callbacks.base import Callback
from footplate.hardware.tpu import findings, pitfalls
from footplate.hardware.tpu.surroundings import wrong_count
from footplate.hardware.transfer import batch_rows
from footplate.hardware.xla import XLA, jax, tpu_chips

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView

log = logging.getLogger(__name__)

USUAL_UNIT = 128


def watch(accelerator: XLA) -> Pitfalls:
    """The callback for one of XLA's accelerators, which name this function."""
    return Pitfalls(jax().devices()[0].platform, len(tpu_chips()))


class Pitfalls(Callback):
    """See the module's docstring.

    Args:
        platform: what JAX calls the devices: "tpu" or "cpu".
        chips: how many TPU chips are attached to this machine.
        least_s: for how long the wait for input is watched before anything is said of it.

    Attributes:
        told: what has been said.
    """

    sees_weights = False

    def __init__(self, platform: str, chips: int = 0, least_s: float = 10.0) -> None:
        self.told: list[str] = []
        self._on_tpu, self._chips, self._least_s = platform == "tpu", chips, least_s
        self._unit = USUAL_UNIT
        self._first = True  # of the processes
        self._looked, self._watches = False, True
        self._began = False  # watching the wait, which begins when the first programs have been compiled
        self._since = self._waited = self._paused_at = self._paused_s = 0.0  # s

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._first = trainer.world.rank == 0
        trainer.data_wait_s = trainer.data_wait_s or 0.0
        weight_readers = [
            who for name in ("on_train_batch_start", "on_train_batch_end") for who in trainer.hooks.weight_readers(name)
        ]
        state_bytes = sum(one.nbytes for one in (*pl_module.parameters(), *pl_module.buffers()))
        self._tell(pitfalls.transfers(weight_readers, state_bytes, trainer.log_every_n_steps))
        if self._on_tpu:
            self._tell(pitfalls.full_precision(trainer.precision.name))
            self._examine()

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.logs_this_step:
            return
        if self._on_tpu and not self._looked:
            self._looked = True
            self._tell(pitfalls.tiny_batches(batch_rows(batch), len(trainer.device_ids)))
            self._tell(_products(trainer, self._unit))
        if self._watches:
            self._watch(trainer.data_wait_s or 0.0)

    def on_validation_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._paused_s += time.perf_counter() - self._paused_at

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        for said in pitfalls.recompilations(getattr(trainer.step, "compilations", ())):
            self._tell(said)

    def _watch(self, waited_s: float) -> None:
        if not self._began:
            self._began, self._since, self._waited, self._paused_s = True, time.perf_counter(), waited_s, 0.0
            return
        elapsed_s = time.perf_counter() - self._since - self._paused_s
        if elapsed_s >= self._least_s:
            said = pitfalls.waiting(waited_s - self._waited, elapsed_s)
            self._watches = said is None
            self._tell(said)

    def _examine(self) -> None:
        """What doesn't fit among the packages and around the machine, as the doctor says it; and the devices' count."""
        import jax

        found = findings.examine(os.environ, self._chips)
        if found.surroundings.slice is not None:
            self._unit = found.surroundings.slice.generation.unit
        for said in (*found.advice, wrong_count(found.surroundings, jax.local_device_count())):
            self._tell(said, of_this_host=True)

    def _tell(self, said: str | None, of_this_host: bool = False) -> None:
        if said is not None and said not in self.told and (self._first or of_this_host):
            self.told.append(said)
            log.warning("%s", said)


def _products(trainer: TrainerView, unit: int) -> str | None:
    """What to say of the matrices of the training step."""
    from footplate.step.xla.capture.matrix_products import products_of

    steps = [one for one in getattr(trainer.step, "captured", ()) if one.trains]
    return pitfalls.small_products(products_of(steps[0].graph), unit) if steps else None

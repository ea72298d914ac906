"""Checkpoint of a run that an exception ends.

The loop sets `Run.in_step` around each step, and the step sets `Step.changing` while gradients, weights or optimizers may
differ from before the batch. They give the phase of a crash, which decides what can be saved:

    between steps       A loader, a callback, validation or a logger has failed. The whole run can be saved, and continues
                        as if nothing had happened.
    in a forward pass   The weights are still those of the last step. The run can be saved. What the failed batch has logged
                        is taken back (`MetricLog.take_back`). What its forward pass has changed, such as running
                        statistics, can't be undone. The continued run says so.
    in a change         Nothing is saved. The run continues from its newest checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from footplate.core.errors import CheckpointError
from footplate.training.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from footplate.training.run import Run

CrashPhase = Literal["between steps", "in a forward pass", "in a change"]


def crash_phase(run: Run) -> CrashPhase:
    """Return the phase in which the training loop raised an exception."""
    if not run.in_step:
        return "between steps"
    return "in a change" if run.step.changing else "in a forward pass"


def is_device_lost(error: BaseException) -> bool:
    """Return True if no tensor of a GPU can be read any more: one of its kernels has failed."""
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error: ") and not is_out_of_memory(error)


def savable(run: Run, error: BaseException) -> bool:
    """Return True if the run can continue from its present state.

    Never with several ranks: the other ranks may be anywhere, and the supervisor restarts all from the newest checkpoint.
    """
    if not run.training_in_progress or run.group.is_distributed:
        return False
    if not isinstance(error, Exception) or isinstance(error, CheckpointError) or is_device_lost(error):
        return False
    return crash_phase(run) != "in a change"

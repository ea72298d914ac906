"""What can be saved of a run that an exception ends.

Between two steps all of it can: the loader, a callback, validation or a logger has failed, and the run continues as if
nothing had happened once that is mended. Inside a step, the weights are still those of the last one as long as the backward
pass has not begun (`Step.changing`). After that nothing is saved: the run continues from its newest checkpoint. What the
failed batch has logged is taken back (`MetricLog.take_back`). What its forward pass has changed (running statistics, say)
can't be undone, which the continued run says.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Literal

from footplate.core.errors import CheckpointError
from footplate.step.base import Step

if TYPE_CHECKING:
    from footplate.training.run import Run

Moment = Literal["between steps", "in a forward pass", "in a change"]


def moment_of(error: BaseException) -> Moment:
    """When an exception of a training loop was raised."""
    steps = [
        owner
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if isinstance(owner := frame.f_locals.get("self"), Step)
    ]
    if not steps:
        return "between steps"
    return "in a change" if any(step.changing for step in steps) else "in a forward pass"


def savable(run: Run, error: BaseException) -> bool:
    """Whether the run as it stands can be continued from.

    Not with several ranks: the others may be anywhere, and the supervisor starts all again from the newest checkpoint.
    """
    if not run.training_in_progress or run.group.is_distributed:
        return False
    if not isinstance(error, Exception) or isinstance(error, CheckpointError):
        return False
    return moment_of(error) != "in a change"

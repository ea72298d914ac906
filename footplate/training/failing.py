"""What can be saved of a run that an exception ends.

Between two steps all of it can: the loader, a callback, validation or a logger has failed, and the run continues as if
nothing had happened once that is mended. Inside a step, the weights are still those of the last one as long as neither the
backward pass nor an optimizer has begun; what the failed forward pass has changed (running statistics, say) can't be
undone, which the continued run says. Where the exception came from is read from its traceback, so a step costs nothing.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Literal

from torch import Tensor
from torch.autograd import graph
from torch.optim import Optimizer

from footplate.errors import CheckpointError
from footplate.parallel.base import Strategy
from footplate.step.base import Step

if TYPE_CHECKING:
    from footplate.trainer import Trainer

Moment = Literal["between steps", "in a forward pass", "in a change"]


def moment_of(error: BaseException) -> Moment:
    """When an exception of a training loop was raised."""
    moment: Moment = "between steps"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, Step):
            moment = "in a forward pass"
        name = frame.f_code.co_name
        of_autograd = frame.f_globals.get("__name__") == graph.__name__ or (
            isinstance(owner, (Tensor, Strategy)) and name == "backward"
        )
        if isinstance(owner, Optimizer) or of_autograd:
            return "in a change"
    return moment


def savable(trainer: Trainer, error: BaseException) -> bool:
    """Whether the run as it stands can be continued from.

    Not with several ranks: the others may be anywhere, and the supervisor starts all again from the newest checkpoint.
    """
    if not trainer.training_in_progress or trainer.group.several:
        return False
    if not isinstance(error, Exception) or isinstance(error, CheckpointError):
        return False
    moment = moment_of(error)
    return moment == "between steps" or (moment == "in a forward pass" and trainer.module.automatic_optimization)

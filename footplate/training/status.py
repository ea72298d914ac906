"""The status of a trainer, under Lightning's names: `trainer.state.status` and `trainer.interrupted` show it."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from footplate.training.run import Run


class TrainerFn(enum.StrEnum):
    """The `stage` that `setup` and `teardown` receive: a string with Lightning's `.value`."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


RunStatus = Literal["initializing", "running", "finished", "interrupted"]


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Set the status of a call of the trainer. Any exception makes it "interrupted"."""
    run.status = "running"
    try:
        yield
    except BaseException:
        run.status = "interrupted"
        raise
    run.status = "finished"

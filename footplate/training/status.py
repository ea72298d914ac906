"""The status of a trainer, under Lightning's names: what `trainer.state.status` and `trainer.interrupted` show."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from footplate.training.run import Run


class TrainerFn(enum.StrEnum):
    """What `setup` and `teardown` get as their `stage`: a string with Lightning's `.value`."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


RunStatus = Literal["initializing", "running", "finished", "interrupted"]


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Set the status for a call of `fit`, `validate`, `test` or `predict`; any exception makes it "interrupted"."""
    run.status = "running"
    try:
        yield
    except BaseException:
        run.status = "interrupted"
        raise
    run.status = "finished"

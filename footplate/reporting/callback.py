"""`Report`: write a report at the end of each `fit`, and record the environment at its beginning."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.callbacks.base import Callback
from footplate.reporting.page import plotly_script

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView

log = logging.getLogger(__name__)


class Report(Callback):
    """Write `report.html` into the run's directory when `fit` ends, also if it fails.

    It also records the environment in `environment.json` when `fit` begins: machine, packages, git commit and command. A
    report that can't be written is a warning, and changes nothing of the run. A process that is killed writes no report:
    use `footplate report RUN` then.

    Args:
        data: read the tables of the run, for their statistics and for pictures of samples.

    Raises:
        MissingExtra: plotly is not installed. This is raised when training begins.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=1, callbacks=[fp.Report()], default_root_dir="runs/reported")
        >>> trainer.fit(model, train)
        >>> (trainer.run_dir / "report.html").exists()
        True
    """

    order = 2
    sees_weights = False

    def __init__(self, data: bool = True) -> None:
        self.data = data
        self._status = "failed"

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage != "fit" or not _writes(trainer):
            return
        plotly_script()
        self._status = "failed"
        from footplate.reporting.environment import record_environment

        devices = [f"{trainer.accelerator.name}:{index}" for index in trainer.device_ids]
        try:
            record_environment(Path(trainer.default_root_dir), devices)
        except Exception as error:
            log.warning("The environment of this run can't be recorded: %s", error)

    def on_fit_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._status = "finished"

    def on_exception(self, trainer: TrainerView, pl_module: Module, exception: BaseException) -> None:
        stopped = isinstance(exception, (KeyboardInterrupt, SystemExit))
        self._status = "interrupted" if stopped else "failed"

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        """Write the report. The loggers have written everything by now."""
        if stage != "fit" or not _writes(trainer):
            return
        from footplate.reporting.report import NAME, write_report
        from footplate.reporting.run_record import read_run

        directory = Path(trainer.default_root_dir)
        try:
            path = write_report([read_run(directory, self._status, self.data)], directory / NAME, self.data)
        except Exception as error:
            # The report must not hide how the run has ended.
            log.warning("The report of this run can't be written: %s", error)
        else:
            log.info("Report: %s", path)


def _writes(trainer: Any) -> bool:
    """Return True on rank 0 of a training that isn't a dry run or a replay."""
    replays = any(getattr(callback, "saves_nothing", False) for callback in trainer.callbacks)
    return trainer.world.rank == 0 and not trainer.fast_dev_run and not replays

"""Methods of a trainer for callbacks and modules, during a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.checkpoint.storage import Place, to_place
from footplate.core.errors import ConfigError
from footplate.hardware.transfer import as_tensors, map_tensors
from footplate.step.optimizers import SchedulerConfig
from footplate.training.saving import wait_for_save, write_checkpoint

if TYPE_CHECKING:
    from footplate.training.run import Run


class TrainerServices:
    """The methods of a `Trainer` for callbacks and modules."""

    run: Run

    # Checkpoints

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Write a checkpoint of the present state, and return when it is complete. All ranks call this.

        Args:
            filepath: a path or a URI.
            weights_only: leave out everything that only resuming needs.
            storage_options: accepted for compatibility. Must be None.

        Raises:
            ConfigError: `storage_options` is given, or nothing has been trained.
        """
        if storage_options is not None:
            raise ConfigError(
                f"save_checkpoint(storage_options={storage_options!r}): there is no plugin that would take them. Give the "
                "address as a URI (s3://…, gs://…). Credentials come from the environment."
            )
        run = self.run
        self.write_checkpoint(run.group.from_first(self.for_all(to_place(filepath))), weights_only)
        wait_for_save(run)
        run.group.barrier()
        if not run.training_in_progress:
            # Otherwise the end of the call closes it.
            run.writer.close()

    def write_checkpoint(
        self, path: Place, weights_only: bool = False, then: Callable[[], None] = lambda: None
    ) -> None:
        """Copy the run's state and write it in the background; see `training/saving.py`. All ranks call this."""
        write_checkpoint(self.run, path, weights_only, then)

    def wait_for_save(self) -> None:
        """Wait until the last save is complete. All ranks call this.

        Raises:
            CheckpointError: it could not be written, on any rank.
        """
        wait_for_save(self.run)

    def for_all(self, place: Place) -> Place:
        """Return a place that is valid on the other ranks too, which may have another working directory."""
        return self.run.placement.for_all(place)

    # Metrics and messages

    def log_now(self, values: dict[str, float]) -> None:
        """Send host floats to the loggers with the next report, for callbacks that measure something."""
        self.run.reports.log_now(values)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress display. Rich renderables are rendered."""
        self.run.print(*args, **kwargs)

    # Ranks

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return `data` of every rank, stacked in a new first dimension. With one process, return `data` itself.

        Args:
            data: tensors and numbers of one shape on all ranks, in any nesting.
            group: accepted for compatibility.
            sync_grads: let gradients flow through the result.

        Raises:
            ConfigError: with `logical_ranks`, where the number of values would be that of processes.
        """
        if self.run.logical is not None:
            raise ConfigError(
                f"logical_ranks={self.run.logical.total}: all_gather() would give one value for each process, which runs "
                "its logical ranks one after another. Log values with self.log(…, sync_dist=True), or leave logical_ranks "
                "out."
            )
        ranks = self.run.group
        if not ranks.is_distributed:
            return data
        return map_tensors(as_tensors(data, self.run.device), lambda tensor: ranks.stack(tensor, sync_grads))

    def clock(self) -> float:
        """Return monotonic seconds, the same on every rank: rank 0's when the ranks last agreed on something."""
        return self.run.agreement.now_s

    # Weight averaging

    def replace_schedulers(self, configs: list[SchedulerConfig]) -> None:
        """Let other schedulers set the learning rates from now on, in checkpoints too."""
        self.run.replace_schedulers(configs)

    def run_forward(self) -> None:
        """Run `training_step` over the training data once more, to collect statistics. On all ranks."""
        self.run.run_forward()

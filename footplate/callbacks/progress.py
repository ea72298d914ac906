"""Progress of a run: a bar in a terminal, one display in a notebook, and lines at intervals anywhere else.

Drawing is limited by time, not by steps: at most ten times a second, and at most a five-hundredth of the time, so that it
doesn't slow down short steps. The displayed metrics are those that were last read from the device. Displaying them reads
nothing.
"""

from __future__ import annotations

import sys
import time
from typing import IO, TYPE_CHECKING, Any

from footplate.callbacks.base import Callback
from footplate.callbacks.notebook_progress import NotebookProgress, in_notebook

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView


REDRAW_S = 0.1
LINE_S = 10.0
# The largest share of time for drawing.
SHARE = 0.002


class ProgressBar(Callback):
    """Show the progress of a run.

    Args:
        stream: the stream to write to. By default the cell's output in a notebook, otherwise standard error.
        terminal: True if `stream` can redraw a line; detected by default.

    Examples:
        >>> import sys
        >>> trainer = fp.Trainer(callbacks=[fp.ProgressBar(stream=sys.stdout)])
    """

    sees_weights = False

    def __init__(self, stream: IO[str] | None = None, terminal: bool | None = None) -> None:
        self._stream = stream
        self._terminal = terminal
        self._due = 0.0
        self._live: Progress | None = None
        # The display of this call, in a notebook.
        self._notebook: NotebookProgress | None = None
        self._total: float = 0
        self._began = 0.0
        self._began_at = 0
        # The epoch's start, in seconds relative to its validation, and the batch at which it started.
        self._epoch_began = (0.0, 0)

    @property
    def stream(self) -> IO[str]:
        """The stream to write to."""
        return sys.stderr if self._stream is None else self._stream

    @property
    def terminal(self) -> bool:
        """True if a line can be redrawn."""
        return self.stream.isatty() if self._terminal is None else self._terminal

    @property
    def redraws(self) -> bool:
        """True if what is shown can be replaced."""
        return self._notebook is not None or self.terminal

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        chosen = self._stream is not None or self._terminal is not None
        self._notebook = NotebookProgress() if not chosen and in_notebook() else None

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._begin(trainer.num_training_batches, trainer.progress.batch_idx)

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._begin(trainer.num_training_batches, trainer.progress.batch_idx)

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._draw(now, self._epoch(trainer), batch_idx + 1, trainer.progress_bar_metrics)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._close()
        metrics, done = trainer.progress_bar_metrics, trainer.progress.batch_idx
        line = self._line(time.monotonic(), self._epoch(trainer), done, metrics)
        if self._notebook is not None:
            self._notebook.add(line)
        else:
            self.print(line)

    def on_validation_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._epoch_began = (self._began - time.monotonic(), self._began_at)
        self._begin(sum(trainer.num_val_batches), 0)

    def on_validation_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated("sanity check" if trainer.sanity_checking else "validation", batch_idx)

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._finish("validation")
        # Continue with the epoch, without the time of validation.
        if trainer.training_in_progress:
            before, began_at = self._epoch_began
            self._begin(trainer.num_training_batches, began_at)
            self._began += before

    def on_test_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._begin(sum(trainer.num_test_batches), 0)

    def on_test_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated("test", batch_idx)

    def on_test_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._finish("test")

    def on_predict_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._begin(sum(trainer.num_predict_batches), 0)

    def on_predict_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated("prediction", batch_idx)

    def on_predict_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._finish("prediction")

    def on_exception(self, trainer: TrainerView, pl_module: Module, exception: BaseException) -> None:
        self._close()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar. Rich renderables are rendered."""
        if self._live is not None:
            self._live.console.print(*args, markup=False, highlight=False, soft_wrap=True, **kwargs)
        elif any(hasattr(item, "__rich_console__") for item in args):
            from rich.console import Console

            Console(file=self.stream).print(*args, **kwargs)
        else:
            print(*args, **{"file": self.stream, **kwargs})

    def _begin(self, total: float, done: int) -> None:
        self._close()
        now = time.monotonic()
        self._total, self._began, self._began_at = total, now, done
        self._due = now + (0.0 if self.redraws else LINE_S)

    def _evaluated(self, name: str, batch_idx: int) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._draw(now, name, batch_idx + 1, {})

    def _epoch(self, trainer: TrainerView) -> str:
        of = f"/{trainer.max_epochs}" if trainer.max_epochs not in (None, -1) and not trainer.has_step_limit else ""
        return f"epoch {trainer.current_epoch + 1}{of}"

    def _draw(self, now: float, name: str, done: int, metrics: dict[str, float]) -> None:
        if self._notebook is not None:
            self._notebook.show(self._line(now, name, done, metrics), done, self._known_total)
        elif self.terminal:
            live = self._live or self._open(name)
            rate, shown = self._rate(now, done), text_of(metrics)
            live.update(live.task_ids[0], description=name, completed=done, rate=rate, metrics=shown, refresh=True)
        else:
            self.stream.write(self._line(now, name, done, metrics) + "\n")
            self.stream.flush()
        after = time.monotonic()
        self._due = after + max(REDRAW_S if self.redraws else LINE_S, (after - now) / SHARE)

    def _open(self, name: str) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(20), MofNCompleteColumn(), "{task.fields[rate]}")
        rest = (TimeRemainingColumn(), TextColumn("{task.fields[metrics]}", style="cyan"))
        console = Console(file=self.stream, force_terminal=True)
        self._live = Progress(*columns, *rest, console=console, auto_refresh=False, transient=True)
        self._live.add_task(name, total=self._known_total, completed=self._began_at, rate="", metrics="")
        self._live.start()
        return self._live

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def _known_total(self) -> float | None:
        return None if self._total in (0, float("inf")) else self._total

    def _finish(self, name: str) -> None:
        """Remove the bar. In a notebook it stays, and is full."""
        self._close()
        if self._notebook is not None and self._known_total is not None:
            self._notebook.show(self._line(time.monotonic(), name, int(self._total), {}), self._total, self._total)

    def _rate(self, now: float, done: int) -> str:
        return f"{(done - self._began_at) / max(1e-9, now - self._began):,.1f}/s" if done > self._began_at else ""

    def _line(self, now: float, name: str, done: int, metrics: dict[str, float]) -> str:
        known = self._known_total is not None
        parts = [name, f"{done}/{self._total:.0f}" if known else f"{done} batches", self._rate(now, done)]
        if known and self._began_at < done < self._total:
            parts.append(f"{clock((now - self._began) * (self._total - done) / (done - self._began_at))} left")
        return "  ".join(part for part in (*parts, text_of(metrics)) if part)


def text_of(metrics: dict[str, float]) -> str:
    """`train_loss 0.31  val_acc 0.89`."""
    return "  ".join(f"{key} {value:.4g}" for key, value in metrics.items())


def clock(seconds: float) -> str:
    """`1:23:45` or `2:05`."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

"""Show how a run gets on: a bar in a terminal, a line now and then anywhere else.

Drawing is bound to time, not to steps: at most ten times a second, and never more than a hundredth of the time, so a
short step is not slowed by being watched. The metrics shown are those that were last read from the device; showing
them reads nothing.
"""

from __future__ import annotations

import sys
import time
from typing import IO, TYPE_CHECKING, Any

from footplate.callbacks.base import Callback

if TYPE_CHECKING:
    from footplate.module import Module
    from footplate.trainer import Trainer

REDRAW_S = 0.1
LINE_S = 10.0
SHARE = 0.01  # of the time that may go into drawing
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class ProgressBar(Callback):
    """See the module's docstring.

    Args:
        stream: where to; standard error by default.
        terminal: whether `stream` can redraw a line; found out by default.
    """

    def __init__(self, stream: IO[str] | None = None, terminal: bool | None = None) -> None:
        self._stream = stream
        self._terminal = terminal
        self._due = 0.0
        self._drawn = ""
        self._total: float = 0
        self._began = 0.0
        self._began_at = 0

    @property
    def stream(self) -> IO[str]:
        """Where to."""
        return sys.stderr if self._stream is None else self._stream

    @property
    def terminal(self) -> bool:
        """Whether a line can be redrawn."""
        return self.stream.isatty() if self._terminal is None else self._terminal

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin(trainer.num_training_batches, trainer.progress.batch_idx)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin(trainer.num_training_batches, trainer.progress.batch_idx)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._draw(now, self._epoch(trainer), batch_idx + 1, trainer.progress_bar_metrics)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        done = trainer.progress.batch_idx
        text = self._text(time.monotonic(), self._epoch(trainer), done, trainer.progress_bar_metrics)
        self._erase()
        self.stream.write(text + "\n")
        self.stream.flush()

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin(sum(trainer.num_val_batches), 0)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated("sanity check" if trainer.sanity_checking else "validation", batch_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._erase()
        if trainer.training_in_progress:
            self._begin(trainer.num_training_batches, trainer.progress.batch_idx)

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin(sum(trainer.num_test_batches), 0)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated("test", batch_idx)

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._erase()

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin(sum(trainer.num_predict_batches), 0)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated("prediction", batch_idx)

    def on_predict_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._erase()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        if self._drawn:
            self.stream.write("\n")
            self._drawn = ""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar; rich renderables are rendered."""
        self._erase()
        if any(hasattr(item, "__rich_console__") for item in args):
            from rich.console import Console

            Console(file=self.stream).print(*args, **kwargs)
        else:
            print(*args, **{"file": self.stream, **kwargs})
        self._due = 0.0 if self.terminal else self._due

    def _begin(self, total: float, done: int) -> None:
        now = time.monotonic()
        self._total, self._began, self._began_at = total, now, done
        self._due = now + (0.0 if self.terminal else LINE_S)

    def _evaluated(self, name: str, batch_idx: int) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._draw(now, name, batch_idx + 1, {})

    def _epoch(self, trainer: Trainer) -> str:
        of = f"/{trainer.max_epochs}" if trainer.max_epochs not in (None, -1) and not trainer.has_step_limit else ""
        return f"epoch {trainer.current_epoch + 1}{of}"

    def _draw(self, now: float, name: str, done: int, metrics: dict[str, float]) -> None:
        text = self._text(now, name, done, metrics)
        if self.terminal:
            self.stream.write(f"\r\x1b[2K{text}")
            self._drawn = text
        else:
            self.stream.write(text + "\n")
        self.stream.flush()
        after = time.monotonic()
        self._due = after + max(REDRAW_S if self.terminal else LINE_S, (after - now) / SHARE)

    def _erase(self) -> None:
        if self._drawn:
            self.stream.write("\r\x1b[2K")
            self._drawn = ""

    def _text(self, now: float, name: str, done: int, metrics: dict[str, float]) -> str:
        rate = (done - self._began_at) / max(1e-9, now - self._began)
        known = self._total not in (0, float("inf"))
        parts = [name]
        if known:
            parts.append(f"{bar(done / self._total)} {done}/{self._total:.0f}")
        else:
            parts.append(f"{done} batches")
        if rate > 0 and done > self._began_at:
            left = f", {clock((self._total - done) / rate)} left" if known and done < self._total else ""
            parts.append(f"{rate:,.1f}/s{left}")
        parts += [f"{key} {value:.4g}" for key, value in metrics.items()]
        return "  ".join(parts)


def bar(fraction: float, width: int = 20) -> str:
    """A bar of block characters, to an eighth of one."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def clock(seconds: float) -> str:
    """`1:23:45` or `2:05`."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

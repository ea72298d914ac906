"""The profiles of one `fit`: which steps are recorded, and when.

    Trainer(profiler=…), footplate run --profile       a range of steps, known before
    footplate profile PID, footplate jobs profile      a request, which a thread of this process receives (`core/stacks/`)

The loop compares the number of its step with `due`, before its first step and after each step. That is all that a step
costs without a profile. When a profile is due, `at_boundary` prepares it, begins it, ends it:

    step 9          step 10  …  step 19     step 20  …
    warm-up         recorded                as before, while a thread writes the files

The thread shares Python's lock with the training, so steps take longer until the files are written. No other profile begins
meanwhile. `fit` waits for the thread before it returns.

With several ranks, a request to one rank counts on all ranks after the same step (`distributed/agreement.py`).

Nothing here ends the training. A profile that fails is given up with a warning.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from footplate.callbacks import ProgressBar
from footplate.callbacks.base import is_kind
from footplate.core.profile_requests import ASK, STATUS, StepRange, range_from_env
from footplate.core.stacks import answering
from footplate.core.threads import join_however_long
from footplate.training.profiler.settings import Profiler
from footplate.training.profiling import NoProfiler

if TYPE_CHECKING:
    from footplate.training.profiler.recording import Recording
    from footplate.training.run import Run

log = logging.getLogger(__name__)


class StepProfiles:
    """The profiles of a `fit`.

    Args:
        run: the run. Its step is built.

    Attributes:
        due: `at_boundary` must be called when the number of the next step is at least this.

    Raises:
        ConfigError: the environment has a range that can't be used.
    """

    def __init__(self, run: Run) -> None:
        self.due: float = math.inf
        self._run = run
        profiler = run.profiler
        self._settings = profiler if isinstance(profiler, Profiler) else Profiler()
        self._ranges = [profiler.step_range] if isinstance(profiler, Profiler) else []
        in_env = None if type(profiler) is NoProfiler and profiler.final else range_from_env(os.environ)
        if in_env is not None and in_env not in self._ranges:
            self._ranges.append(in_env)
        self._ranges.sort(key=lambda steps: steps.first)
        self._recording: Recording | None = None
        # Steps that a request has asked for, and all ranks have agreed on. Another thread may set it.
        self._wanted = 0
        self._lock = threading.Lock()
        self._status: dict[str, Any] = {"state": "idle"}
        # Requests are refused when the training is over.
        self._over = False
        self._restore_handlers: Callable[[], None] = lambda: None
        self._writer: threading.Thread | None = None
        # The summary of a profile that was written, for the loop to print.
        self._summary: str | None = None

    @contextlib.contextmanager
    def while_training(self) -> Iterator[None]:
        """Make the profiles of the training in a `with` block, and answer requests."""
        run = self._run
        run.agreement.on_profile = self._want
        self._restore_handlers = _handling({ASK: self._ask, STATUS: lambda arguments: dict(self._status)})
        self._set_due()
        try:
            yield
            self._end()
        finally:
            run.agreement.on_profile = lambda steps: None
            if self._recording is not None:
                self._give_up("the training was interrupted")
            with self._lock:
                self._over = True
            self.due = math.inf

    def close(self) -> None:
        """Wait until all files are written, and stop answering. Comes after the last checkpoint, also after an error."""
        self._await_writer()
        self._restore_handlers()
        self.due = math.inf

    # Requests, in another thread

    def _ask(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Take a request. With several ranks, it counts when they have agreed on it. After the training: None."""
        steps = arguments["steps"]
        with self._lock:
            if self._over:
                return None
            if self._status["state"] in ("waiting", "recording", "writing"):
                return {"error": "a profile is being made already"}
            if not isinstance(steps, int) or steps < 1:
                return {"error": f"steps={steps!r}: expected a number of steps, at least 1"}
            self._status = {"state": "waiting", "id": arguments["id"]}
        if self._run.group.is_distributed:
            self._run.agreement.profile_steps = steps
        else:
            self._want(steps)
        return {"step": self._run.progress.global_step, "run_dir": str(self._run.run_dir.absolute())}

    def _want(self, steps: int) -> None:
        with self._lock:
            if self._status["state"] not in ("recording", "writing"):
                self._status = {**self._status, "state": "waiting"}
            self._wanted = steps
            self.due = 0

    # Between two steps

    def at_boundary(self, ends_epoch: bool = False) -> None:
        """Prepare, begin, continue or end a profile, as it is due between two steps.

        Args:
            ends_epoch: no step follows in this epoch. The next epoch calls this again before its first step.
        """
        step = self._now()
        self._show_summary()
        try:
            if self._recording is not None:
                self._advance(self._recording, step, ends_epoch)
            if self._recording is None:
                self._begin_due(step, ends_epoch)
        except Exception as error:
            # torch, Kineto, JAX or a disk may fail in any way. The training goes on.
            self._give_up(f"{type(error).__name__}: {error}")
        self._set_due()

    def _now(self) -> int:
        """The number of the next step. Without an optimizer, batches count."""
        progress = self._run.progress
        return progress.global_step if self._run.optimizers else progress.batches

    def _advance(self, recording: Recording, step: int, ends_epoch: bool) -> None:
        if recording.begun is None:
            if step >= recording.steps.first and not ends_epoch:
                recording.start(step)
        elif step >= recording.steps.last:
            self._finish(recording, step)
        elif ends_epoch:
            recording.end_epoch()
        else:
            recording.next_step(step)

    def _begin_due(self, step: int, ends_epoch: bool) -> None:
        steps = self._next_range(step)
        if steps is None:
            return
        from footplate.training.profiler.recording import Recording

        # It would record the thread that writes the one before.
        self._await_writer()
        self._set_status("recording", first=steps.first, last=steps.last)
        recording = self._recording = Recording(self._run, steps, self._settings)
        recording.prepare()
        if step >= steps.first and not ends_epoch:
            recording.start(step)

    def _next_range(self, step: int) -> StepRange | None:
        """The steps whose profile, or whose warm-up, begins now."""
        with self._lock:
            wanted, self._wanted = self._wanted, 0
        if wanted:
            # One step later, for the warm-up.
            return StepRange(step + 1, step + 1 + wanted)
        while self._ranges and self._ranges[0].first - 1 <= step:
            steps = self._ranges.pop(0)
            if step < steps.last:
                return steps
            self._warn(f"the steps {steps} were over when it could begin, at step {step}")
        return None

    def _finish(self, recording: Recording, step: int) -> None:
        """End a recording, and let a thread write its files."""
        began = time.monotonic()
        self._set_status("writing")
        recording.stop(step)
        self._recording = None
        waited_s = time.monotonic() - began
        self._writer = threading.Thread(
            target=self._write, args=(recording, began, waited_s), name="footplate-profile", daemon=True
        )
        self._writer.start()

    def _write(self, recording: Recording, began: float, waited_s: float) -> None:
        """Write the files of a profile, in a thread."""
        try:
            written = recording.write()
        except Exception as error:
            self._set_status("failed", error=f"{type(error).__name__}: {error}")
            self._warn_given_up(f"{type(error).__name__}: {error}")
            return
        seconds = time.monotonic() - began
        with self._lock:
            self._summary = (
                f"{written.summary}\n  written    in {seconds:.1f} s, of which the training waited {waited_s:.1f} s"
            )
            self.due = 0
        self._set_status("done", directory=str(written.directory), summary=written.summary)

    def _await_writer(self) -> None:
        """Wait until the files of the latest profile are written, and print its summary."""
        if self._writer is not None:
            join_however_long(self._writer, "it writes a profile")
            self._writer = None
        self._show_summary()

    def _show_summary(self) -> None:
        with self._lock:
            summary, self._summary = self._summary, None
        if summary is not None and self._run.world.rank == 0:
            _show(self._run, summary)

    def _end(self) -> None:
        """End a profile with the training, and warn of steps that the training hasn't reached."""
        step, recording = self._now(), self._recording
        if recording is not None and recording.begun is not None and step > recording.begun:
            last = recording.steps.last
            try:
                self._finish(recording, step)
            except Exception as error:
                self._give_up(f"{type(error).__name__}: {error}")
            if step < last:
                self._warn(f"the training ended before step {last}, so the profile has {step - recording.begun} steps")
        elif recording is not None:
            self._give_up(f"the training ended before step {recording.steps.first}")
        for steps in self._ranges:
            self._warn(f"the training ended after {step} steps, so the steps {steps} were not recorded")
        if self._status["state"] == "waiting":
            self._set_status("failed", error="the training ended before the profile could begin")

    def _give_up(self, reason: str) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            with contextlib.suppress(Exception):
                recording.abort()
        self._set_status("failed", error=reason)
        self._warn_given_up(reason)

    def _warn_given_up(self, reason: str) -> None:
        rank = f" of rank {self._run.world.rank}" if self._run.group.is_distributed else ""
        log.warning("The profile%s was given up: %s. The training goes on.", rank, reason)

    def _warn(self, text: str) -> None:
        if self._run.world.rank == 0:
            log.warning("Profiler: %s.", text)

    def _set_due(self) -> None:
        with self._lock:
            if self._wanted or self._recording is not None or self._summary is not None:
                self.due = 0
            elif self._ranges:
                # The warm-up is one step before. Without an optimizer, `global_step` stays 0.
                self.due = max(0, self._ranges[0].first - 1) if self._run.optimizers else 0
            else:
                self.due = math.inf

    def _set_status(self, state: str, **facts: Any) -> None:
        with self._lock:
            kept = {"id": self._status["id"]} if "id" in self._status else {}
            self._status = {**kept, "state": state, **facts}


def _handling(handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]]) -> Callable[[], None]:
    """Handle requests. Returns a function that restores the handlers of before."""
    before = {name: answering.handlers.get(name) for name in handlers}
    answering.handlers.update(handlers)

    def restore() -> None:
        for name, handler in before.items():
            if handler is None:
                answering.handlers.pop(name, None)
            else:
                answering.handlers[name] = handler

    return restore


def _show(run: Run, text: str) -> None:
    """Print a text, above the progress display if there is one. Somebody has asked for it."""
    if any(is_kind(callback, ProgressBar) for callback in run.callbacks):
        run.print(text)
    else:
        print(text, flush=True)

"""Names of the phases of a step in a trace, while a profile is recorded.

    ProfilerStep#12                                       from the end of a step to the end of the next
      next batch                                          the wait for it, its transfer, `on_train_batch_start`
      training step                                       the step, with `forward`, `backward` and `optimizer step` in it
      after the step                                      schedulers, callbacks, loggers, checkpoints, validation

After the last step of an epoch comes `end of the epoch`. torch.profiler's own tools look for `ProfilerStep#`. The phases
are found by replacing methods of the step, on the object. `remove` puts back what was there. A step on XLA runs as one
program, so it has no phases.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from footplate.step.phase_times import replaced

STEP = "ProfilerStep#"
INPUT, TRAIN, AFTER = "next batch", "training step", "after the step"
# Methods of the step, in the order of a step.
PHASES = {"forward": "forward", "backpropagate": "backward", "end_window": "optimizer step"}
VALIDATION, END_OF_EPOCH = "validation", "end of the epoch"
NAMES = (INPUT, TRAIN, *PHASES.values(), AFTER, VALIDATION)

Annotate = Callable[[str], contextlib.AbstractContextManager[Any]]
# The annotations of the profile that this process records; None while it records none.
_annotate: Annotate | None = None


def named_region(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that has a name in the trace. It does nothing if no profile is recorded."""
    return contextlib.nullcontext() if _annotate is None else _annotate(name)


class Regions:
    """The regions of one profile.

    Args:
        step: the run's step.
        annotate: makes a context that has a name in the trace.
    """

    def __init__(self, step: Any, annotate: Annotate) -> None:
        self._step, self._annotate = step, annotate
        # A step that is a generator runs when its first output is asked for, so its call tells nothing.
        self._in_phases = not inspect.isgeneratorfunction(type(step).train)
        self._replaced = contextlib.ExitStack()
        self._open: list[contextlib.AbstractContextManager[Any]] = []

    def install(self) -> None:
        """Replace methods of the step."""
        global _annotate
        _annotate = self._annotate
        step = self._step
        if not self._in_phases:
            return
        methods = {
            name: self._recorded(getattr(step, name), region) for name, region in PHASES.items() if hasattr(step, name)
        }
        methods |= {"train": self._recorded_train(step.train), "evaluate": self._recorded(step.evaluate, VALIDATION)}
        self._replaced.enter_context(replaced(step, **methods))
        if hasattr(step, "show_phases") and not step.shows_phases:
            step.show_phases()
            self._replaced.callback(step.show_phases, False)

    def remove(self) -> None:
        """Put the step's methods back, and close what is open. May be called twice."""
        global _annotate
        _annotate = None
        self.end_step()
        self._replaced.close()

    def begin_step(self, number: int) -> None:
        """Begin a step, between two steps of the loop."""
        self._enter(f"{STEP}{number}")
        if self._in_phases:
            self._enter(INPUT)

    def begin(self, name: str) -> None:
        """Begin a region between two steps. `end_step` ends it."""
        self._enter(name)

    def end_step(self) -> None:
        """End the step, and what is open in it."""
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def _enter(self, name: str) -> None:
        context = self._annotate(name)
        context.__enter__()
        self._open.append(context)

    def _leave(self) -> None:
        """Close the region inside the step."""
        if len(self._open) > 1:
            self._open.pop().__exit__(None, None, None)

    def _recorded_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._leave()
            with self._annotate(TRAIN):
                outputs = train(*args, **kwargs)
            if self._open:
                self._enter(AFTER)
            return outputs

        return call

    def _recorded(self, function: Callable[..., Any], region: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._annotate(region):
                return function(*args, **kwargs)

        return call

"""Looks at single steps: what they tell of all steps of a training.

    looks.train(run, …)          a look: one step is timed by its phases, or examined
    looks.divided(step_s, …)     the seconds of many steps, divided as those of the steps that were timed

A few of the first looks examine the step instead: its operations are counted, and the time between them is measured. Only
what at least two of these have seen, and all of them, counts as a pause: a single pause may be another program's doing, or
the first use of a library.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from footplate.step.examined_step import ExaminedStep
from footplate.step.phase_times import PhaseTimes

if TYPE_CHECKING:
    from footplate.training.run import Run

EXAMINED_LOOKS = (2, 4, 6, 8)


class StepLooks:
    """The looks of one training.

    Attributes:
        timed: the steps that were timed.
        least_step_s: the time of the fastest of them.
        examined: the operations of a step; None if none was examined.
        pauses: shares of an examined step in which no operation ran, by the lines before and after. Empty until two steps
            are examined.
    """

    def __init__(self) -> None:
        self.timed = 0
        self.least_step_s = math.inf
        self.examined: ExaminedStep | None = None
        self.pauses: dict[tuple[str, str], float] = {}
        # The pauses that all examined steps have; None before the first.
        self._common: dict[tuple[str, str], float] | None = None
        self._looks = 0
        self._phases: dict[str, float] = {}
        self._launching_s = self._looked_s = 0.0

    def train(self, run: Run, batches: Sequence[Any], batch_idx: int, last: bool) -> Iterable[Any]:
        """Train on a chunk of batches, as `Step.train` does, and look at it."""
        self._looks += 1
        arguments = batches, batch_idx, last, run.progress.epoch
        if self._looks in EXAMINED_LOOKS and _can_examine(run):
            return self._examine(run, *arguments)
        with PhaseTimes(run.step) as times:
            outputs = run.step.train(*arguments)
        if times.seconds:
            self._add(times)
        return outputs

    @property
    def launching(self) -> float | None:
        """On a GPU, the share of the timed steps in which the host launched operations. None elsewhere."""
        return self._launching_s / self._looked_s if self._looked_s else None

    def divided(self, step_s: float, waits_s: float) -> dict[str, float]:
        """Divide the seconds of steps into phases.

        Args:
            step_s: the seconds, without those in which the backward pass only waited.
            waits_s: the seconds of a step in which the timed backward passes only waited.
        """
        phases = dict(self._phases)
        if "backward" in phases:
            phases["backward"] = max(0.0, phases["backward"] - waits_s * self.timed)
        looked_s = sum(phases.values())
        return {phase: step_s * spent / looked_s for phase, spent in phases.items()} if looked_s else {"step": step_s}

    def _examine(self, run: Run, *arguments: Any) -> Iterable[Any]:
        # While its phases are timed, a step calls each of them by its method, as a look does.
        with PhaseTimes(run.step), ExaminedStep() as examined:
            outputs = run.step.train(*arguments)
        pauses = {lines: seconds / examined.seconds for lines, seconds in examined.pauses.items()}
        if self._common is None:
            self._common = pauses
        else:
            before = self._common
            pauses = {lines: min(share, before[lines]) for lines, share in pauses.items() if lines in before}
            self.pauses = self._common = pauses
        self.examined = examined
        return outputs

    def _add(self, times: PhaseTimes) -> None:
        seconds = sum(times.seconds.values())
        self.timed += 1
        self.least_step_s = min(self.least_step_s, seconds)
        for phase, spent in times.seconds.items():
            self._phases[phase] = self._phases.get(phase, 0.0) + spent
        if times.launching_s is not None:
            self._launching_s += times.launching_s
            self._looked_s += seconds


def _can_examine(run: Run) -> bool:
    """Return True if a mode of torch may see a step's operations: it is eager, not compiled, on one device."""
    compiled = run.config.compile_options is not None or ("torch._dynamo.eval_frame" in sys.modules and any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in run.module.modules()
    ))  # fmt: skip
    return hasattr(run.step, "show_phases") and not compiled and not run.parallel.copies

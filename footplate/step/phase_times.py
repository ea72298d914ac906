"""Times of the phases of one eager step: forward, backward, optimizer.

    with PhaseTimes(step) as times:
        step.train(…)
    times.seconds       {"forward": 0.003, "backward": 0.006, "optimizer": 0.001, "step": 0.0001}

A step is timed only now and then, so other steps cost nothing. While it is timed, the methods of its phases are replaced,
and a GPU finishes each phase before the next. So a GPU's phases have the time of their kernels. `launching_s` is the time
that the host needed to launch them: if it is nearly all, the GPU waits for the host.

What `StepSpec.times` counts as communication counts for no phase: the clock stands still meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from footplate.core.time_split import TimeSplit
from footplate.step.base import Step

PHASES = {
    "forward": "forward",
    "backpropagate": "backward",
    "differentiate": "backward",
    "step_by_closure": "optimizer",
    "end_window": "optimizer",
    "make_manual_step": "optimizer",
}


@contextlib.contextmanager
def replaced(step: Step, **attributes: Any) -> Iterator[None]:
    """Replace methods or other attributes of a step, on the object, for a `with` block. Then put back what was there."""
    own = vars(step)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


class PhaseTimes:
    """The times of the steps that run in a `with` block.

    Args:
        step: its phases are timed, if it has them as methods.

    Attributes:
        seconds: by phase; "step" is the rest of the step. Empty for a step without such methods.
        launching_s: on a GPU, the seconds in which the host launched operations. None elsewhere.
    """

    def __init__(self, step: Step) -> None:
        self.seconds: dict[str, float] = {}
        self.launching_s: float | None = None
        self._step = step
        self._training = step.spec.times
        self._times = TimeSplit("step", self._clock)
        self._replaced = contextlib.ExitStack()
        self._on_gpu = step.spec.device.type == "cuda"
        self._waited_s = 0.0

    def __enter__(self) -> PhaseTimes:
        step = self._step
        if hasattr(step, "show_phases"):
            timed = {name: functools.partial(self._timed, getattr(step, name), phase) for name, phase in PHASES.items()}
            self._replaced.enter_context(replaced(step, bare=False, **timed))
            if self._on_gpu:
                self._wait()
                self.launching_s = 0.0
        self._times = TimeSplit("step", self._clock)
        return self

    def __exit__(self, *exception: object) -> None:
        if hasattr(self._step, "show_phases"):
            if self._on_gpu:
                # A step that is a CUDA graph has no phases.
                self._wait()
            self.seconds = self._times.total()
        self._replaced.close()

    def _clock(self) -> float:
        return time.perf_counter() - self._training.spent("communication")

    def _timed(self, function: Callable[..., Any], phase: str, *args: Any) -> Any:
        outermost = self._times.cause == "step"
        with self._times.during(phase):
            began, waited_s = time.perf_counter(), self._waited_s
            result = function(*args)
            if self.launching_s is not None:
                if outermost:
                    # A phase inside this one has waited for its kernels.
                    self.launching_s += time.perf_counter() - began - (self._waited_s - waited_s)
                self._wait()
        return result

    def _wait(self) -> None:
        """Wait until the GPU has run all operations."""
        began = time.perf_counter()
        torch.cuda.synchronize(self._step.spec.device)
        self._waited_s += time.perf_counter() - began

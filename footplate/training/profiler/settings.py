"""`Profiler`: the settings of a profile. `Trainer(profiler="torch")` is `Trainer(profiler=Profiler())`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from footplate.core.errors import ConfigError
from footplate.core.profile_requests import StepRange

STEPS = "10:20"


@dataclass
class Profiler:
    """Records a range of training steps with torch.profiler (Kineto), or with JAX's profiler in runs on XLA.

    The files are in `profile-STEP` in the run's directory; `docs/guide/profiling.md` describes them. Steps outside the
    range run as without a profiler.

    Args:
        steps: the first step and the step after the last: "10:20" or (10, 20). A profile begins and ends between two
            optimizer steps, so with `iterations_per_loop` it has whole chunks.
        with_stack: record Python's calls, for the table by source line. The recorded steps take longer. On XLA, the table
            doesn't need them.
        record_shapes: keep the shapes of the operators' inputs in the trace.
        profile_memory: record allocations, for the timeline of memory.
        with_flops: estimate the floating-point operations of matrix products and convolutions.

    Raises:
        ConfigError: not a range of steps.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=10, profiler=fp.Profiler("10:20", record_shapes=True))
    """

    steps: str | tuple[int, int] = STEPS
    with_stack: bool = True
    record_shapes: bool = False
    profile_memory: bool = True
    with_flops: bool = False
    step_range: StepRange = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.step_range = StepRange.parse(self.steps)
        for name in ("with_stack", "record_shapes", "profile_memory", "with_flops"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"Profiler({name}={getattr(self, name)!r}): expected True or False.")

    def profile(self, action_name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose time is shown under this name in the trace. Without a recording it does nothing."""
        from footplate.training.profiler.regions import named_region

        return named_region(action_name)

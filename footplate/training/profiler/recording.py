"""One profile of one rank: from the step before its first to its files.

    warm-up → recorded steps → stop │ in another thread: write → `profile-STEP/` in the run's directory

    trace-rank0.json.gz     open it in https://ui.perfetto.dev or chrome://tracing
    operators-rank0.md      times by operator
    lines-rank0.md          times by line of the user's code
    memory-rank0.csv        allocations in time order
    summary-rank0.txt       the most important results

Files of an earlier attempt with the same names are replaced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.core.profile_requests import StepRange
from footplate.training.profiler import tables
from footplate.training.profiler.regions import END_OF_EPOCH, Regions
from footplate.training.profiler.settings import Profiler

if TYPE_CHECKING:
    from footplate.training.run import Run

OPERATORS, LINES, MEMORY, SUMMARY = "operators-rank{}.md", "lines-rank{}.md", "memory-rank{}.csv", "summary-rank{}.txt"


@dataclass(frozen=True)
class Written:
    """The files of a profile.

    Attributes:
        directory: their directory.
        summary: the most important results.
        steps: the steps that were recorded.
    """

    directory: Path
    summary: str
    steps: StepRange


class Recording:
    """A profile that is being recorded.

    Args:
        run: the run.
        steps: the steps to record.
        settings: what to record.

    Attributes:
        steps: the steps to record, or those that were recorded.
        begun: the first recorded step; None during the warm-up.
    """

    def __init__(self, run: Run, steps: StepRange, settings: Profiler) -> None:
        self.steps = steps
        self.begun: int | None = None
        self._run = run
        self._trace = _trace_of(run, settings)
        self._regions = Regions(run.step, self._trace.annotate)

    def prepare(self) -> None:
        """Prepare the profiler, one step before the first if there is one.

        Raises:
            Exception: it can't record.
        """
        self._trace.prepare()

    def start(self, step: int) -> None:
        """Begin to record with a step.

        Raises:
            Exception: the profiler can't record.
        """
        self._trace.start()
        self._regions.install()
        self._regions.begin_step(step)
        self.begun = step

    def next_step(self, step: int) -> None:
        """End a step, and begin the next."""
        self._regions.end_step()
        self._regions.begin_step(step)

    def end_epoch(self) -> None:
        """End a step, which is the last of its epoch. What follows is no step."""
        self._regions.end_step()
        self._regions.begin(END_OF_EPOCH)

    def stop(self, step: int) -> None:
        """End the recording. Nothing of the profiler runs in the training afterwards.

        Args:
            step: the step after the last.

        Raises:
            Exception: the profiler failed.
        """
        assert self.begun is not None
        self._regions.remove()
        self._trace.stop()
        self.steps = StepRange(self.begun, max(step, self.begun + 1))

    def write(self) -> Written:
        """Write the files of a recording that was stopped. Any thread may call it, while the training goes on.

        Raises:
            Exception: the profiler failed, or a file can't be written.
        """
        directory = self._run.run_dir.absolute() / f"profile-{self.steps.first}"
        directory.mkdir(parents=True, exist_ok=True)
        return Written(directory, self._write(directory, self.steps), self.steps)

    def abort(self) -> None:
        """End the recording without files. Nothing of the profiler runs afterwards."""
        self._regions.remove()
        self._trace.abort()

    def _write(self, directory: Path, steps: StepRange) -> str:
        world = self._run.world
        results, files = self._trace.write(directory, world.rank, steps)
        title = f"steps {steps.first} to {steps.last - 1}, rank {world.rank} of {world.size}, {self._run.device}"
        contents = {OPERATORS: tables.operators_table(results, title), LINES: tables.lines_table(results, title)}
        if results.allocations is not None:
            contents[MEMORY] = tables.memory_table(results.allocations, steps.first)
        names = [*files, *(name.format(world.rank) for name in contents)]
        contents[SUMMARY] = summary = tables.summary(results, title, directory, names)
        for name, text in contents.items():
            _replace(directory / name.format(world.rank), text)
        return summary


def _replace(path: Path, text: str) -> None:
    """Write a file as a whole, so that a reader never sees a part of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _trace_of(run: Run, settings: Profiler) -> Any:
    """The profiler of the run's accelerator."""
    if run.accelerator.owns_weights:
        from footplate.training.profiler.jax_trace import JaxTrace

        # The step of an accelerator of somebody else may have other programs.
        return JaxTrace(settings, lambda: getattr(run.step, "captured", {}))
    from footplate.training.profiler.torch_trace import TorchTrace

    return TorchTrace(settings, run.device)

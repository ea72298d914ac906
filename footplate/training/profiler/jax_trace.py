"""The recording by JAX's profiler, in runs on XLA.

JAX writes an XPlane file and a trace for Perfetto, both of the whole process. The table by operator has the operations of
the compiled program (HLO), which XLA has fused from those of torch. A program has no lines of the user's code:
`training_step` runs once, when it is captured. Allocations aren't recorded either.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from footplate.core.profile_requests import StepRange
from footplate.training.profiler.regions import STEP
from footplate.training.profiler.settings import Profiler
from footplate.training.profiler.tables import OperatorRow, RegionRow, Results

TRACE, XPLANE = "trace-rank{}.json.gz", "xplane-rank{}.pb"
_STEP = STEP.rstrip("#")  # JAX reads facts of an event after a "#"
_NO_LINES = (
    "On XLA, `training_step` is a compiled program: there are no times by line of your code, and no allocations. Profile "
    'the same training with `accelerator="cpu"` to see lines.'
)
_NO_OPERATORS = (
    "JAX's profiler has recorded no operation of a compiled program. On a processor, XLA runs a small program in one "
    "piece, without a record of its operations."
)


class JaxTrace:
    """A recording.

    Args:
        settings: what to record. `with_stack` records Python's calls in the trace.
    """

    tool = "jax.profiler"

    def __init__(self, settings: Profiler) -> None:
        self._settings = settings
        self._folder: Path | None = None
        self._records = False
        self._began_ns = self._wall_ns = 0

    def prepare(self) -> None:
        """Make the folder for JAX's files."""
        self._folder = Path(tempfile.mkdtemp(prefix="footplate-profile-"))

    def start(self) -> None:
        """Begin to record.

        Raises:
            RuntimeError: another profiler of JAX records in this process.
        """
        # The host is ahead of the devices.
        _wait_for_devices()
        options: Any = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(self._settings.with_stack)
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._records, self._began_ns = True, time.perf_counter_ns()

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context that has a name in the trace."""
        if name.startswith(STEP):
            return jax.profiler.StepTraceAnnotation(_STEP, step_num=int(name.removeprefix(STEP)))
        return jax.profiler.TraceAnnotation(name)

    def stop(self) -> None:
        """End the recording, after the devices have finished. Nothing of the profiler runs afterwards."""
        if self._records:
            self._records = False
            _wait_for_devices()
            self._wall_ns = time.perf_counter_ns() - self._began_ns
            jax.profiler.stop_trace()

    def abort(self) -> None:
        """End the recording without a result, in whichever state it is."""
        with contextlib.suppress(Exception):
            self.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, directory: Path, rank: int, steps: StepRange) -> tuple[Results, list[str]]:
        """Move JAX's files into the profile's directory. Returns the results, and the names of the files.

        Args:
            directory: the profile's directory.
            rank: this rank.
            steps: the recorded steps.

        Raises:
            OSError: JAX has written nothing, or a file can't be moved.
        """
        assert self._folder is not None
        try:
            files = []
            for pattern, name in (("*.trace.json.gz", TRACE), ("*.xplane.pb", XPLANE)):
                found = sorted(self._folder.glob(f"plugins/profile/*/{pattern}"))
                if not found:
                    raise OSError(f"JAX's profiler has written no {pattern}")
                shutil.move(found[0], directory / name.format(rank))
                files.append(name.format(rank))
            return read_xplane(directory / XPLANE.format(rank), self._wall_ns, steps.last), files
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def read_xplane(path: Path, wall_ns: int, last: int) -> Results:
    """Sum the events of an XPlane file.

    Args:
        path: the file.
        wall_ns: the time of all recorded steps, until the devices had finished.
        last: the step after the last.
    """
    operators: dict[str, OperatorRow] = {}
    named: dict[str, RegionRow] = {}
    steps: set[int] = set()
    for line in _lines(path):
        for event in line.events:
            facts = dict(event.stats)
            if event.name == _STEP and "step_num" in facts:
                steps |= {int(facts["step_num"])} - {last}
            elif "hlo_op" in facts and not event.name.startswith("end: "):
                name = str(facts["hlo_op"])
                row = operators.setdefault(name, OperatorRow(name))
                row.calls += 1
                row.self_ns += int(event.duration_ns)
                row.total_ns += int(event.duration_ns)
                module = str(facts.get("hlo_module", "program"))
                program = named.setdefault(module, RegionRow(module))
                program.calls += 1
                program.total_ns += int(event.duration_ns)
    count = max(1, len(steps))
    return Results(
        tool=JaxTrace.tool,
        steps_ns=[wall_ns // count] * count,
        regions=sorted(named.values(), key=lambda row: -row.total_ns),
        operators=sorted(operators.values(), key=lambda row: -row.self_ns),
        notes=[_NO_LINES] if operators else [_NO_OPERATORS, _NO_LINES],
    )


def _wait_for_devices() -> None:
    for array in jax.live_arrays():
        if not array.is_deleted():
            array.block_until_ready()


def _lines(path: Path) -> Iterator[Any]:
    """The timelines of an XPlane file."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        yield from plane.lines

"""The recording by JAX's profiler, in runs on XLA.

JAX writes an XPlane file and a trace for Perfetto, both of the whole process. The table by operator has the operations of
the compiled program (HLO), which XLA has fused from those of torch. `training_step` itself runs once, when it is captured.
The lines are those of the captured operations (`hlo_origins.py`), and the memory is the program's plan (`hlo_results.py`).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from footplate.core.profile_requests import StepRange
from footplate.step.xla.capture import Captured
from footplate.training.profiler.hlo_origins import origins_of
from footplate.training.profiler.hlo_proto import read_programs
from footplate.training.profiler.hlo_results import HloEvent, HloResults
from footplate.training.profiler.regions import STEP
from footplate.training.profiler.settings import Profiler
from footplate.training.profiler.tables import Results

TRACE, XPLANE = "trace-rank{}.json.gz", "xplane-rank{}.pb"
_STEP = STEP.rstrip("#")  # JAX reads facts of an event after a "#"
_ABOUT = (
    "These are the operations of compiled programs, on all devices together. An operation that XLA has fused from "
    "several lines is divided among them in proportion to the elements that it computes for each."
)
_UNKNOWN = (
    "The operations of {} have no lines, since they aren't those of the present step. The step was compiled again during "
    "the profile, or another version of Footplate has put the program into the cache: delete {}, and profile again."
)
_NO_OPERATORS = (
    "JAX's profiler has recorded no operation of a compiled program. On a processor, XLA runs a small program in one "
    "piece, without a record of its operations."
)
_NO_PLAN = (
    "There is no memory over time: the cache of compiled programs doesn't keep XLA's plan. To see it, set "
    "JAX_ENABLE_COMPILATION_CACHE=false and profile again."
)
_NO_PROGRAMS = "JAX's profiler has recorded operations without their programs, so there are no lines and no memory."


class JaxTrace:
    """A recording.

    Args:
        settings: what to record. `with_stack` records Python's calls in the trace.
        captured: returns the captured steps of the programs that exist, by the programs' names.
    """

    tool = "jax.profiler"

    def __init__(self, settings: Profiler, captured: Callable[[], Mapping[str, Captured]]) -> None:
        self._settings = settings
        self._captured = captured
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
                matches = sorted(self._folder.glob(f"plugins/profile/*/{pattern}"))
                if not matches:
                    raise OSError(f"JAX's profiler has written no {pattern}")
                shutil.move(matches[0], directory / name.format(rank))
                files.append(name.format(rank))
            path, memory = directory / XPLANE.format(rank), self._settings.profile_memory
            return read_xplane(path, self._wall_ns, steps, self._captured(), memory), files
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def read_xplane(path: Path, wall_ns: int, steps: StepRange, captured: Mapping[str, Captured], memory: bool) -> Results:
    """Make the tables of an XPlane file.

    Args:
        path: the file.
        wall_ns: the time of all recorded steps, until the devices had finished.
        steps: the recorded steps.
        captured: the captured steps of the programs, by the programs' names.
        memory: make the table of the memory, too.
    """
    events, count = list(_events(path)), steps.last - steps.first
    origins = {name: origins_of(step) for name, step in captured.items()}
    hlo = HloResults(events, read_programs(path) if events else (), origins)
    results = Results(
        tool=JaxTrace.tool,
        steps_ns=[wall_ns // count] * count,
        regions=hlo.programs(),
        operators=hlo.operators(),
        about=_ABOUT,
    )
    if not hlo.has_programs:
        return replace(results, notes=[_NO_PROGRAMS if events else _NO_OPERATORS])
    config: Any = jax.config
    lines, other_ns = hlo.lines(wall_ns)
    notes = [_UNKNOWN.format(name, config.jax_compilation_cache_dir) for name in hlo.unknown]
    return replace(
        results,
        lines=lines,
        other_ns=other_ns,
        allocations=hlo.allocations(jax.default_backend(), count) if memory and hlo.has_plans else None,
        notes=[*notes, _NO_PLAN] if memory and not hlo.has_plans else notes,
    )


def _events(path: Path) -> Iterator[HloEvent]:
    """The operations that have run."""
    for line in _lines(path):
        for event in line.events:
            facts = dict(event.stats)
            if "hlo_op" in facts and not event.name.startswith("end: "):
                run = (int(facts.get("run_id", 0)), int(facts.get("device_ordinal", 0)))
                number, module = int(facts.get("program_id", -1)), str(facts.get("hlo_module", "program"))
                start_ns, duration_ns = int(event.start_ns), int(event.duration_ns)
                yield HloEvent(number, module, run, str(facts["hlo_op"]), start_ns, duration_ns)


def _wait_for_devices() -> None:
    for array in jax.live_arrays():
        if not array.is_deleted():
            array.block_until_ready()


def _lines(path: Path) -> Iterator[Any]:
    """The timelines of an XPlane file."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        yield from plane.lines

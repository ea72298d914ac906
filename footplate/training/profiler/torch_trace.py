"""The recording by torch.profiler (Kineto): operators, kernels, Python's calls, allocations.

    prepare  →  start  →  stop  →  write        or at any time before `write`: abort

`prepare` comes one step before `start`: on a GPU, the profiler's own set-up would otherwise be in the first recorded step.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]

from footplate.core.garbage import no_collection
from footplate.core.profile_requests import StepRange
from footplate.training.profiler.event_tree import EventTree
from footplate.training.profiler.settings import Profiler
from footplate.training.profiler.tables import Results, User, user_files

TRACE = "trace-rank{}.json.gz"
# The longest wait for a moment in which no other thread runs.
_QUIET_S = 0.1
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")


# This process records. A loader's worker that is forked meanwhile must not go on recording, into memory that nobody reads.
_recording = False


def _after_fork_in_child() -> None:
    if _recording:
        sys.setprofile(None)


os.register_at_fork(after_in_child=_after_fork_in_child)


class TorchTrace:
    """A recording.

    Args:
        settings: what to record.
        device: the training's device.
    """

    tool = "torch.profiler"

    def __init__(self, settings: Profiler, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._profile: Any = None
        self._started = False
        self._stopped = False
        self._user: User | None = None

    def prepare(self) -> None:
        """Prepare the recording.

        Raises:
            RuntimeError: another profiler records in this process.
        """
        if _profiler_enabled():
            raise RuntimeError("another torch.profiler records in this process")
        # Otherwise Kineto prints lines about itself.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        from torch.profiler import ProfilerActivity, profile, supported_activities

        settings = self._settings
        activities = {ProfilerActivity.CPU}
        if self._device.type != "cpu":
            activities = set(supported_activities())
        self._profile = profile(
            activities=activities,
            with_stack=settings.with_stack,
            record_shapes=settings.record_shapes,
            profile_memory=settings.profile_memory,
            with_flops=settings.with_flops,
        )
        self._profile.prepare_trace()

    def start(self) -> None:
        """Begin to record.

        Raises:
            RuntimeError: another profiler records in this process.
        """
        if _profiler_enabled():
            raise RuntimeError("another torch.profiler records in this process")
        global _recording
        self._started = _recording = True
        with _undisturbed():
            self._profile.start_trace()

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context that has a name in the trace."""
        return torch.profiler.record_function(name)

    def stop(self) -> None:
        """End the recording. Nothing of the profiler runs afterwards."""
        global _recording
        if self._profile is not None and not self._stopped:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._stopped, _recording = True, False
            with _undisturbed():
                self._profile.stop_trace()
            # The program may change `sys.path` while the files are being written.
            self._user = User(user_files())

    def abort(self) -> None:
        """End the recording without a result, in whichever state it is."""
        if self._profile is None or self._stopped:
            return
        with contextlib.suppress(Exception):
            if not self._started:
                # Kineto can only be stopped after it was started.
                self.start()
            self.stop()
        self._profile = None

    def write(self, directory: Path, rank: int, steps: StepRange) -> tuple[Results, list[str]]:
        """Write the trace. Returns the results for the tables, and the names of the files written.

        Args:
            directory: the profile's directory.
            rank: this rank.
            steps: the recorded steps.

        Raises:
            OSError: the trace can't be written.
        """
        trace = TRACE.format(rank)
        self._export(directory / trace)
        device_ns = self._device_times()
        roots = self._profile.profiler.kineto_results.experimental_event_tree()
        assert self._user is not None
        tree = EventTree(roots, self._user, device_ns, steps.last)
        results = tree.results(lines=self._settings.with_stack, memory=self._settings.profile_memory)
        self._profile = None
        return results, [trace]

    def _export(self, path: Path) -> None:
        """Write the trace. torch would compress it line by line, which takes most of the time."""
        plain = path.with_name(f".{path.stem}.{os.getpid()}")
        packed = plain.with_name(plain.name + ".gz")
        try:
            self._profile.export_chrome_trace(str(plain))
            # torch has lost the names of some code objects (see `event_tree.py`), which makes invalid text.
            with plain.open(errors="replace") as source, gzip.open(packed, "wb", compresslevel=3) as target:
                while text := source.read(1 << 20):
                    target.write(_CONTROL.sub(" ", text).encode())
            packed.replace(path)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)

    def _device_times(self) -> dict[int, float]:
        """The time of each operator's own kernels, in ns, by the operator's correlation id. Empty without a GPU."""
        if self._device.type == "cpu":
            return {}
        return {
            event.id: event.self_device_time_total * 1e3
            for event in self._profile.events()
            if event.self_device_time_total > 0
        }


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let torch change the profile functions of all threads in a `with` block.

    In Python 3.11, the process crashes if torch meets a thread of C++ that has just begun to take the GIL, as threads of
    gloo do after each collective. So the block begins when no other thread runs, if there is such a moment. Garbage isn't
    collected meanwhile: that may give the GIL away while torch acts as another thread.
    """
    until = time.monotonic() + _QUIET_S
    # Other threads get the GIL while this one sleeps.
    time.sleep(0.001)
    while _another_thread_runs() and time.monotonic() < until:
        time.sleep(0.001)
    with no_collection():
        yield


def _another_thread_runs() -> bool:
    """Return True if another thread of this process runs, or waits for a processor. False where Linux doesn't tell."""
    own = str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            if task.name != own and (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "R":
                return True
    return False

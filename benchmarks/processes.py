"""Programs that are started to be killed: found again whole, however their processes were started, and ended.

Every process of a program has `MARK` in the environment that it was started with, and its children have it too, also
those that have left its session and lost their parent. So nothing that a program leaves behind escapes `Program.alive`.
"""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

MARK = "FOOTPLATE_BENCHMARK_PROGRAM"


class Program:
    """A program with all the processes that come of it.

    Args:
        command: what to run.
        said: the file that its output is appended to.
        environment: variables over those of this process.
    """

    def __init__(self, command: Sequence[str], said: Path, environment: Mapping[str, str] | None = None) -> None:
        self._mark = uuid.uuid4().hex
        self._said = said
        with said.open("ab") as file:
            self._before = file.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **(environment or {}), MARK: self._mark},
                start_new_session=True,
            )

    def alive(self) -> list[psutil.Process]:
        """All of its processes that are there, but for zombies."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def left(self, patience_s: float) -> list[psutil.Process]:
        """Those that are still there after so long a wait."""
        deadline = time.monotonic() + patience_s
        while (found := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def kill(self) -> None:
        """End all of it."""
        while found := self.alive():
            for process in found:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.02)
        self.process.wait()

    def said(self, nbytes: int = 3000) -> str:
        """The end of what it has said."""
        return self._said.read_bytes()[self._before :][-nbytes:].decode(errors="replace")

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

"""Programs that are started and then killed, with all of their processes.

Every process of a program has `MARK` in its initial environment. Its children inherit the mark, even if they leave its
session and lose their parent. So `Program.alive` finds every process that a program leaves behind.
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
    """A program with all processes that descend from it.

    Args:
        command: the command to run.
        said: the file to which the output is appended.
        environment: variables in addition to those of this process.
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
        """All of its processes that exist, except zombies."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def left(self, patience_s: float) -> list[psutil.Process]:
        """Processes that still exist after a wait of `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while (processes := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return processes

    def kill(self) -> None:
        """Kill all processes of the program."""
        while processes := self.alive():
            for process in processes:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.02)
        self.process.wait()

    def said(self, nbytes: int = 3000) -> str:
        """The end of the program's output."""
        return self._said.read_bytes()[self._before :][-nbytes:].decode(errors="replace")

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

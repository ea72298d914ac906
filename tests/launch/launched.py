"""Programs that launch workers, for tests that kill them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from footplate.launch import fork_server_pool

ROOT = Path(__file__).parent.parent.parent


class Program:
    """A running program. Its output and its log are one stream."""

    def __init__(self, text: str, place: Path) -> None:
        script = place / "program.py"
        script.write_text(text)
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, str(script)], cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip

    def read_until(self, *words: str) -> str:
        """Read the output up to the line after which all `words` have appeared."""
        text = ""
        while not all(word in text for word in words):
            line = self.process.stdout.readline()
            assert line, f"ended early:\n{text}"
            text += line
        return text

    def family(self) -> list[psutil.Process]:
        """All descendants of the process."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, within_s: float = 60) -> tuple[int, str]:
        """Wait for its end, at most `within_s` after that of its output. Return the exit code and the remaining output."""
        rest = self.process.stdout.read()
        return self.process.wait(within_s), rest


def pooled_pids() -> list[int]:
    """The process ids of the fork servers in the pool, the oldest first."""
    return [server.process.pid for server in fork_server_pool._pool]


def gone(processes: list[psutil.Process], within_s: float = 30) -> bool:
    """Return True if all these processes end in time. A zombie has ended. Without a kill they would run for 60 s."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(runs(process) for process in processes):
            return True
        time.sleep(0.01)
    return False


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

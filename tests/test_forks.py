"""A script in a fork of a process that has imported torch runs as in a fresh interpreter."""

from __future__ import annotations

import time
from pathlib import Path

import forks
import pytest

pytestmark = pytest.mark.slow


def run(directory: Path, text: str, *arguments: str, **settings: float) -> forks.Ended:
    script = directory / "script.py"
    script.write_text(text)
    return forks.run(script, *arguments, cwd=directory, **settings)


def test_a_script_has_its_own_arguments_directory_environment_and_module(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", "yes")
    text = "import os, sys; print(__name__, sys.argv[1:], sys.path[0], os.getcwd(), os.environ['OF_THIS_TEST'])"
    ended = run(tmp_path, text, "a", "b c")
    assert (ended.returncode, ended.stdout) == (0, f"__main__ ['a', 'b c'] {tmp_path} {tmp_path} yes\n")


def test_the_names_and_threads_of_one_script_are_not_in_the_next(tmp_path: Path):
    assert run(tmp_path, "import torch; torch.left = 1; torch.set_num_threads(2)").returncode == 0
    text = "import threading, torch; print(hasattr(torch, 'left'), threading.active_count())"
    assert run(tmp_path, text).stdout == "False 1\n"


def test_an_exit_status_a_traceback_and_a_signal_are_reported(tmp_path: Path):
    assert run(tmp_path, "import atexit, sys; atexit.register(print, 'the end'); sys.exit(3)") == forks.Ended(
        3, "the end\n", ""
    )
    failed = run(tmp_path, "raise ValueError('wrong')")
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "ValueError: wrong")
    assert run(tmp_path, "import os; os.kill(os.getpid(), 9)").returncode == -9


def test_a_script_that_takes_too_long_is_killed_with_its_processes(tmp_path: Path):
    text = "import os, time; os.fork(); open(f'{os.getpid()}.pid', 'w').close(); time.sleep(600)"
    with pytest.raises(TimeoutError, match="took more than 10 s"):
        run(tmp_path, text, timeout_s=10.0)
    processes = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(processes) == 2
    deadline = time.monotonic() + 30
    while any(is_alive(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert run(tmp_path, "print('next')").stdout == "next\n"


def is_alive(process: int) -> bool:
    """Return True if a process runs. A zombie doesn't."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False

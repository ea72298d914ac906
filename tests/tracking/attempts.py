"""Attempts of a run for the tests of loggers: rows with a known curve, and a process that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from footplate.tracking import Logger


def log_steps(logger: Logger, steps: Iterable[int]) -> None:
    """Log a loss at each step."""
    for step in steps:
        logger.log_metrics({"loss": step / 10}, step, 0)


def expected(steps: Iterable[int]) -> list[tuple[int, float]]:
    """The curve that `log_steps` logs."""
    return [(step, step / 10) for step in steps]


def wait_until(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def killed_attempt(logger: str, run_dir: Path, state: Any, steps: range, checkpoint_at: int) -> Any:
    """A training process that continues from a state, takes a checkpoint's state, logs further steps and is killed.

    Args:
        logger: the name of the logger's class.
        run_dir: the run's directory.
        state: the state of an earlier checkpoint; None for the first attempt.
        steps: the steps to log.
        checkpoint_at: the step of the checkpoint, whose state is returned.
    """
    script = f"""
        import json, os, pathlib, signal
        from footplate.tracking import {logger}
        logger = {logger}()
        state = json.loads({json.dumps(state)!r})
        if state:
            logger.load_state_dict(state)
        logger.setup(pathlib.Path({str(run_dir)!r}), {{"epochs": 2}})
        # A logger of files has none. That of MLflow waits for its run.
        assert getattr(logger, "run_id", True)
        for step in range({steps.start}, {steps.stop}):
            logger.log_metrics({{"loss": step / 10}}, step, 0)
            if step == {checkpoint_at}:
                logger.flush()
                print(json.dumps(logger.state_dict()))
        logger.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-u", "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return json.loads(done.stdout)

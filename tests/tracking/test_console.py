"""The console: plain lines, at an interval, that never stop training."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

from footplate.core.errors import ConfigError
from footplate.tracking import Console


def lines(capsys):
    """The printed lines, without the time."""
    printed = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d  ", line) for line in printed)
    return [line[10:] for line in printed]


def test_every_report_is_a_line_with_interval_0(run_dir, capsys):
    logger = Console(interval_s=0)
    logger.setup(run_dir, {})
    logger.log_metrics({"train_loss": 0.431234567, "lr": 1e-5}, 1250, 2)
    logger.log_metrics({"test_acc": float("nan")})
    logger.finalize("success")
    assert lines(capsys) == [
        "step 1,250  epoch 2  train_loss 0.431235  lr 1e-05", "step 1,250  test_acc nan", "success",
    ]  # fmt: skip


def test_within_the_interval_only_the_first_and_the_last_values_are_printed(run_dir, capsys):
    logger = Console(interval_s=3600)
    logger.setup(run_dir, {})
    for step in range(100):
        logger.log_metrics({"loss": step}, step, 0)
    logger.log_metrics({"val_loss": 7.0}, 99, 0)
    logger.finalize("failed")
    assert lines(capsys) == ["step 0  epoch 0  loss 0", "step 99  epoch 0  loss 99  val_loss 7", "failed"]


def test_the_error_output_can_be_used(run_dir, capsys):
    logger = Console(stderr=True)
    logger.setup(run_dir, {})
    logger.log_metrics({"loss": 1.0}, 0, 0)
    logger.finalize("success")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "loss 1" in printed.err


def test_a_pipe_that_nobody_reads_does_not_stop_training(run_dir):
    """The pipe takes 64 KiB. After that, each print blocks."""
    script = f"""
        import pathlib, sys
        from footplate.tracking import Console
        logger = Console(interval_s=0)
        logger.setup(pathlib.Path({str(run_dir)!r}), {{}})
        for step in range(20_000):
            logger.log_metrics({{"loss": 1.0}}, step, 0)
        print("trained", file=sys.stderr, flush=True)
    """
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr.readline() == "trained\n"
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        os.close(reading)
        os.close(writing)


def test_a_negative_interval_is_refused():
    with pytest.raises(ConfigError, match=r"interval_s=-1\): expected 0 or more"):
        Console(interval_s=-1)

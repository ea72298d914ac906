"""examples/trainer as a plain program: it trains, is interrupted, continues, and leaves a self-contained model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import template
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(job_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer.task", "--job-dir", str(job_dir), "--epochs", "1"]
    return template.Popen(command, cwd=EXAMPLES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> int:
    """Wait for the program's end. Return the total number of steps that it trained."""
    out = process.communicate(timeout=200)[0]
    assert process.returncode == 0, out
    match = re.search(r"val_acc (\S+) after (\d+) steps", out)
    assert match, out
    assert float(match[1]) > 0.6
    return int(match[2])


@pytest.mark.slow
def test_it_goes_on_from_its_newest_checkpoint_when_it_is_killed_and_leaves_a_model(tmp_path):
    first = start(tmp_path)
    limit = time.monotonic() + 200
    while not any(tmp_path.glob("checkpoints/*.ckpt/meta.json")):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert finish(start(tmp_path)) == 188  # 12,000 rows in batches of 64
    lines = (tmp_path / "metrics.csv").read_text()
    assert lines.count("val_acc") == 1
    predict = torch.export.load(str(tmp_path / "model.pt2")).module()
    assert predict(torch.zeros(3, 1, 28, 28, dtype=torch.uint8)).shape == (3, 10)

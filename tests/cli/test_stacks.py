"""`footplate stacks PID | DIR`."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SLEEPS = """
    import time
    import torch
    import footplate as fp

    class Slow(fp.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 2)
        def training_step(self, batch, batch_idx):
            print("sleeps", flush=True)
            time.sleep(300)
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fp.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir="run",
    ).fit(Slow(), torch.utils.data.DataLoader(torch.ones(4, 4)))
"""


def test_a_training_is_asked_by_its_process_or_its_directory(footplate, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SLEEPS))
    with subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        assert b"sleeps\n" in iter(process.stdout.readline, b"")
        where = rf"process {process.pid} is in `Slow.training_step` \({re.escape(str(script))}:12\)"
        for training in (str(process.pid), str(tmp_path / "run")):
            result = footplate("stacks", training)
            assert result.code == 0
            assert re.match(where, result.out)
            assert f"process {process.pid} (python" in result.out.splitlines()[2]
        process.kill()
    assert f"this machine has no process {process.pid} now" in footplate("stacks", str(process.pid)).err


@pytest.mark.parametrize(
    ("lock", "message"),
    [
        (None, "no training uses this directory now"),
        ("", "no training uses this directory now"),
        ("[1]", "no training uses this directory now"),
        ('{"pid": 7, "host": "another"}', "process 7 on another trains in it. Ask there: footplate stacks 7"),
        (f'{{"pid": {2**22 + 1}, "host": "{socket.gethostname()}"}}', f"this machine has no process {2**22 + 1} now"),
    ],
)
def test_mistakes(footplate, tmp_path: Path, lock: str | None, message: str) -> None:
    if lock is not None:
        (tmp_path / ".lock").write_text(lock)
    result = footplate("stacks", str(tmp_path))
    assert result.code == 2
    assert message in result.err

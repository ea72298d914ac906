"""Errors of kernels. They leave the process without a GPU, so each case has a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
from models.small import Classifier, loader
import footplate as fp

class Wrong(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0], batch[1] + (100 if batch_idx == 7 else 0)), batch_idx)

trainer = fp.Trainer(accelerator="cuda", devices=1, max_epochs=1, enable_progress_bar=False, logger=False,
                     default_root_dir="run", log_every_n_steps=5, callbacks=[fp.ModelCheckpoint(every_n_train_steps=5)])
trainer.fit(Wrong(), loader())
"""


def test_a_label_out_of_range_is_told_in_words_and_the_last_checkpoint_stays(tmp_path):
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(tests), str(tests.parent), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        capture_output=True,
    )
    last = ended.stderr.strip().splitlines()[-1]
    print(ended.stderr[-3000:])
    assert ended.returncode == 1
    assert "DataError: A kernel on the GPU has refused a value." in last
    assert [path.name for path in (tmp_path / "run").rglob("*step*5*")], list((tmp_path / "run").rglob("*"))

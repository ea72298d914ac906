"""`footplate profile PID | DIR`, and `--profile` of `footplate run` and `footplate fit`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import template

ROOT = Path(__file__).parent.parent.parent
TRAINS = """
    import sys
    import time
    from pathlib import Path
    import torch
    import footplate as fp

    class Net(fp.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 2)
        def training_step(self, batch, batch_idx):
            (Path.cwd() / "trains").touch()
            time.sleep(0.02)
            return self.net(batch).mean()
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if (Path.cwd() / "end").exists():
                self.trainer.should_stop = True
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(name, **settings):
        fp.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, default_root_dir=name, **settings,
        ).fit(Net(), torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4))

    if __name__ == "__main__":
        if sys.argv[1] == "both":
            train("first", max_steps=6)
            train("second", max_steps=6)
        else:
            train("run", max_epochs=-1, devices=int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAINS))
    return path


def wait_for(path: Path, timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < until, f"{path} isn't there after {timeout_s} s"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "profiles"), [(1, 2), (2, 10)])
def test_a_training_is_profiled_many_times_by_its_process_or_its_directory(
    footplate, script: Path, ranks: int, profiles: int
) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    output = script.parent / "output"
    with output.open("w") as file:
        process = template.Popen([sys.executable, script, ranks], env=environ, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_for(script.parent / "trains")
        for number in range(1, profiles + 1):
            training = str(process.pid) if number == 1 else "run"
            result = footplate("profile", training, "--steps", "2")
            assert result.code == 0, f"{result.err}\nThe training: {process.poll()}\n{output.read_text()}"
            assert f", rank 0 of {ranks}, cpu: " in result.out.splitlines()[0]
            folders = list((script.parent / "run").glob("profile-*"))
            assert len(folders) == number
            traces = {f"trace-rank{rank}.json.gz" for rank in range(ranks)}
            assert all({path.name for path in folder.glob("trace-*")} == traces for folder in folders)
        (script.parent / "end").touch()
        process.communicate(120)
        assert process.returncode == 0
    finally:
        process.kill()


def test_mistakes(footplate, script: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print('there', flush=True); input()"], stdin=-1, stdout=-1
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        result = footplate("profile", str(process.pid))
        process.kill()
    assert result.code == 2
    assert f"{process.pid}: no Trainer.fit runs in these processes now." in result.err
    assert f"this machine has no process {process.pid} now" in footplate("profile", str(process.pid)).err
    assert "no training uses this directory now" in footplate("profile", ".").err
    for steps in ("0", "-3", "1001"):
        assert (
            f"--steps {steps}: expected a number of steps from 1 to 1000."
            in footplate("profile", "1", "--steps", steps).err
        )


@pytest.mark.slow
def test_run_profiles_steps_of_each_training_of_the_script(footplate, script: Path) -> None:
    result = footplate("run", "--np", "2", "--profile", "2:4", "train.py", "both")
    assert result.code == 0, result.err
    for name in ("first", "second"):
        for rank in (0, 1):
            assert f"Profile of steps 2 to 3, rank {rank} of 2" in (
                script.parent / name / "profile-2" / f"summary-rank{rank}.txt"
            ).read_text()  # fmt: skip


def test_a_bad_range_is_an_error_before_anything_starts(footplate, script: Path) -> None:
    result = footplate("run", "--profile", "4:2", "train.py", "both")
    assert result.code == 2
    assert (
        "--profile='4:2': expected the first step and the step after the last, such as \"10:20\" for ten steps."
        in result.err
    )
    assert not (script.parent / "trains").exists()


def test_fit_profiles_steps(footplate, net, tmp_path: Path) -> None:
    result = footplate("fit", *net, "--profile", "1:3")
    assert result.code == 0, result.err
    profile = tmp_path / "run/profile-1"
    assert (profile / "trace-rank0.json.gz").exists()
    assert "flowers.py:" in (profile / "lines-rank0.md").read_text()
    result = footplate("fit", *net, "--profile", "1")
    assert result.code == 2
    assert "--profile='1': expected the first step" in result.err
    assert "FOOTPLATE_PROFILE" not in os.environ

"""The examples: each runs as a script, from any directory, and prints what its text promises."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import template

ROOT = Path(__file__).parent.parent


def run_example(name: str, directory: Path, *arguments: str) -> str:
    """Run an example in a directory of its own, on one core. Return its output."""
    done = template.run(ROOT / "examples" / name, *arguments, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_quickstart_learns(tmp_path):
    command = [sys.executable, ROOT / "examples" / "quickstart.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loss = re.search(r"loss (\S+) after 320 steps", done.stdout)
    assert float(loss.group(1)) < 0.4  # 0.69 before


@pytest.mark.slow
def test_images_killed_and_started_again_ends_with_the_loss_of_a_run_that_was_never_killed(tmp_path):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    for directory in (cut, whole):
        directory.mkdir()

    command = [sys.executable, ROOT / "examples" / "images.py"]
    with (tmp_path / "output").open("w") as output:
        process = template.Popen(
            command, packages=template.WITH_LIGHTNING, cwd=cut, stdout=output, stderr=subprocess.STDOUT
        )
    while not list(cut.glob("runs/images/checkpoints/*.ckpt")):
        assert process.poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL

    continued, uninterrupted = run_example("images.py", cut), run_example("images.py", whole)
    last_lines = continued.splitlines()[-2:]
    assert re.fullmatch(r"loss 0\.\d{9} after 564 steps", last_lines[0])
    assert last_lines == uninterrupted.splitlines()[-2:]


@pytest.mark.slow
def test_lakehouse_images_goes_from_one_version_of_a_table_to_a_table_of_predictions(tmp_path):
    printed = run_example("lakehouse_images.py", tmp_path)
    assert "version=0" in printed
    assert "num_rows=3000" in printed
    assert "with 2000 rows" in printed
    assert list((tmp_path / "runs/lakehouse/predictions").glob("*.parquet"))


@pytest.mark.slow
@pytest.mark.engine
def test_lakehouse_goes_from_a_spark_dataframe_through_an_old_version_to_a_resumed_model(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    printed = run_example("lakehouse.py", tmp_path)
    runs = re.findall(r"version 0: off by (\S+) minutes after (\d+) steps", printed)
    (first, steps), (last, more_steps) = [(float(error), int(count)) for error, count in runs]
    assert more_steps == 3 * steps
    assert last < 0.7 * first


@pytest.mark.slow
def test_resume_ends_with_the_weights_of_a_run_that_was_never_interrupted(tmp_path):
    printed = run_example("resume.py", tmp_path)
    assert "interrupted: an error at batch 150" in printed
    assert "bit for bit the same: True" in printed


@pytest.mark.slow
def test_a_module_and_a_callback_of_lightning_train_as_they_are(tmp_path):
    before, after = re.findall(r"loss (\S+)", run_example("third_party_lightning.py", tmp_path))
    assert float(after) < 0.7 * float(before)


@pytest.mark.slow
def test_estimator_goes_on_where_its_directory_stands(tmp_path):
    lines = [
        run_example("estimator.py", tmp_path, "run", "--max-steps", steps, "--accelerator", "cpu")
        for steps in ("80", "120")
    ]
    runs = [re.search(r"steps (\d+) to (\d+): accuracy (\S+)", line).groups() for line in lines]
    assert [ends for *ends, _ in runs] == [["0", "80"], ["80", "120"]]
    assert float(runs[1][2]) > 0.6


@pytest.mark.slow
def test_the_ladder_has_the_same_result_on_every_rung(tmp_path):
    printed = run_example("ladder.py", tmp_path, "1", "-2")
    alone, two = (float(loss) for loss in re.findall(r"np=.*: val_loss (\S+)", printed))
    assert alone == pytest.approx(two, abs=2e-4)
    assert alone < 1.0  # 2.3 before training


@pytest.mark.slow
@pytest.mark.engine
def test_scaling_compares_one_process_with_two(tmp_path):
    printed = run_example("scaling.py", tmp_path, "--part", "0.1")
    assert re.search(r"2 processes took \S+ s, and 1 took \S+ s: efficiency", printed)
    assert (tmp_path / "runs/scaling/scaling.png").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) < 60

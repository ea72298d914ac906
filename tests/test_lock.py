"""One writer in a run's directory, whoever dies and however."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from models.small import Classifier, loader

import footplate as fp
from footplate.training.lock import only_writer

HOLDS = """
    import multiprocessing, pathlib, sys, time
    from footplate.training.lock import only_writer
    with only_writer(pathlib.Path(sys.argv[1])):
        if sys.argv[2] == "with a worker":
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
        print("held", flush=True)
        time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds a directory; gone at the end."""
    script = tmp_path / "holds.py"
    script.write_text(textwrap.dedent(HOLDS))
    started: list[subprocess.Popen] = []

    def start(directory, mode="alone"):
        process = subprocess.Popen(
            [sys.executable, script, directory, mode], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_second_writer_is_refused_with_the_name_of_the_first(tmp_path, holder):
    process = holder(tmp_path / "run")
    with (
        pytest.raises(fp.ConfigError, match=rf"is in use: process {process.pid} on .* trains in it"),
        only_writer(tmp_path / "run", patience_s=0.1),
    ):
        pass


@pytest.mark.parametrize("mode", ["alone", "with a worker"])
def test_a_holder_that_was_killed_holds_nothing_though_its_workers_live(mode, tmp_path, holder):
    process = holder(tmp_path / "run", mode)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with only_writer(tmp_path / "run", patience_s=0.1):
        pass


def test_a_holder_that_is_about_to_go_is_waited_for(tmp_path, holder):
    process = holder(tmp_path / "run")
    began = time.monotonic()
    waiting = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid}"])
    with only_writer(tmp_path / "run", patience_s=60):
        assert time.monotonic() - began >= 0.5
    waiting.wait()


def test_a_run_is_refused_before_anything_of_the_other_is_touched(tmp_path, holder, trainer, monkeypatch):
    monkeypatch.setattr(only_writer.__wrapped__, "__defaults__", (0.1,))
    directory = tmp_path / "run"
    trainer(max_epochs=1).fit(Classifier(), loader())
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}
    holder(directory)
    with pytest.raises(fp.ConfigError, match=r"is in use.*Wait for it or end it"):
        trainer(max_epochs=2).fit(Classifier(), loader())
    after = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}
    assert before == after


def test_the_same_process_trains_again_and_again_in_its_directory(trainer):
    for epochs in (1, 2):
        trainer(max_epochs=epochs).fit(Classifier(), loader(), ckpt_path="last")


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(fp.ConfigError, match=r"file/run.*can't be written to: Not a directory"),
        only_writer(tmp_path / "file" / "run"),
    ):
        pass

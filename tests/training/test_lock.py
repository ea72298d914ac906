"""One writer in a run's directory, regardless of which process dies and how."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
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
    """A function that starts a process that holds a directory. The process ends with the test."""
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


def test_a_run_is_refused_before_anything_of_the_other_is_touched(tmp_path, holder, make_trainer, monkeypatch):
    monkeypatch.setattr(only_writer.__wrapped__, "__defaults__", (0.1,))
    directory = tmp_path / "run"
    make_trainer(max_epochs=1).fit(Classifier(), loader())
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}
    holder(directory)
    with pytest.raises(fp.ConfigError, match=r"is in use.*Wait for it or end it"):
        make_trainer(max_epochs=2).fit(Classifier(), loader())
    after = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}
    assert before == after


def test_the_same_process_trains_again_and_again_in_its_directory(make_trainer):
    for epochs in (1, 2):
        make_trainer(max_epochs=epochs).fit(Classifier(), loader(), ckpt_path="last")


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(fp.ConfigError, match=r"file/run.*can't be written to: Not a directory"),
        only_writer(tmp_path / "file" / "run"),
    ):
        pass


def as_attempt(monkeypatch, number: int, launch: str = "one") -> None:
    monkeypatch.setenv("FOOTPLATE_LAUNCH", launch)
    monkeypatch.setenv("FOOTPLATE_ATTEMPT", str(number))


def refused(directory) -> bool:
    try:
        with only_writer(directory, patience_s=0.1):
            return False
    except fp.ConfigError:
        return True


def test_a_later_attempt_of_a_launch_takes_over_a_lock_that_is_left_and_nobody_else_does(tmp_path, holder, monkeypatch):
    as_attempt(monkeypatch, 1)
    process = holder(tmp_path)
    assert refused(tmp_path)
    as_attempt(monkeypatch, 2, "another launch")
    assert refused(tmp_path)
    as_attempt(monkeypatch, 0)
    assert refused(tmp_path)

    as_attempt(monkeypatch, 2)
    with only_writer(tmp_path, patience_s=0.1):
        assert process.poll() is None, "the earlier attempt should still hold its lock"
        as_attempt(monkeypatch, 1)
        assert refused(tmp_path)
        process.kill()
        process.wait()
        as_attempt(monkeypatch, 7, "another launch")
        assert refused(tmp_path), "the end of the earlier attempt must not free the later one's lock"
    assert not refused(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "holds.py"]


def test_a_later_attempt_of_a_job_takes_over_too(tmp_path, holder, monkeypatch):
    monkeypatch.setenv("FOOTPLATE_JOB_ID", "flowers/1")
    monkeypatch.setenv("FOOTPLATE_JOB_ATTEMPT", "1")
    holder(tmp_path)
    assert refused(tmp_path)
    monkeypatch.setenv("FOOTPLATE_JOB_ATTEMPT", "2")
    assert not refused(tmp_path)


def test_an_attempt_that_was_replaced_writes_no_further_checkpoint(tmp_path, make_trainer, monkeypatch):
    class Replaced(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 4:
                trainer.wait_for_save()
                successor.append(subprocess.Popen([sys.executable, "-c", TAKES_OVER, trainer.run_dir], env=later))
                assert successor[0].wait() == 0

    as_attempt(monkeypatch, 0)
    successor: list[subprocess.Popen] = []
    later = {**os.environ, "FOOTPLATE_ATTEMPT": "1"}
    saver = fp.ModelCheckpoint(every_n_train_steps=2)
    run = make_trainer(max_epochs=1, callbacks=[Replaced(), saver])
    with pytest.raises(fp.CheckpointError, match="a later attempt trains in it now"):
        run.fit(Classifier(), loader())
    steps = [fp.checkpoint.load(path)["global_step"] for path in (run.run_dir / "checkpoints").glob("*.ckpt")]
    assert max(steps) < 6


TAKES_OVER = """
import pathlib, sys
from footplate.training.lock import only_writer
with only_writer(pathlib.Path(sys.argv[1]), patience_s=0.1):
    pass
"""


def test_the_lock_leaves_nothing_behind(tmp_path):
    with only_writer(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []


def test_only_one_of_many_has_it_at_a_time_though_each_removes_the_file(tmp_path):
    inside, most = [], []

    def take(name: int) -> None:
        for _ in range(20):
            with only_writer(tmp_path, patience_s=120):
                inside.append(name)
                most.append(len(inside))
                inside.remove(name)

    threads = [threading.Thread(target=take, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 80
    assert set(most) == {1}

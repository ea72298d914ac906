"""Files of a profile that are written while the training goes on, and files that cannot be written."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import footplate as fp
from footplate.core.errors import ConfigError
from footplate.core.profile_requests import VARIABLE, request_profile
from footplate.training.profiler.recording import Recording, Written
from training.profiled_nets import Net, Remember, assert_nothing_is_left, batches, events, steps_in

pytestmark = pytest.mark.usefixtures("_warnings_are_seen")


def test_a_profile_that_cannot_be_written_is_given_up_with_a_warning(make_trainer, tmp_path: Path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/profile-2").write_text("a file, where the directory would be")
    training = make_trainer(max_steps=8, profiler=fp.Profiler("2:4"))
    training.fit(Net(), batches())
    assert training.global_step == 8
    (warning,) = (record.message for record in caplog.records if "profile" in record.message.lower())
    assert warning.startswith("The profile was given up: FileExistsError")
    assert warning.endswith("The training goes on.")
    assert_nothing_is_left(training)


def test_a_disk_that_is_full_ends_the_profile_and_not_the_training(make_trainer, tmp_path: Path, caplog):
    # /dev/full takes no byte.
    folder = tmp_path / "run/profile-2"
    folder.mkdir(parents=True)
    (folder / f".trace-rank0.json.{os.getpid()}.gz").symlink_to("/dev/full")
    training = make_trainer(max_steps=8, profiler=fp.Profiler("2:4"))
    training.fit(Net(), batches())
    assert training.global_step == 8
    assert "The profile was given up: OSError: [Errno 28] No space left on device" in caplog.text
    assert_nothing_is_left(training)
    assert not (folder / "trace-rank0.json.gz").exists()


class SlowWrites:
    """Files are written when the training allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_write = threading.Event(), threading.Event()
        write = Recording.write

        def slow(recording: Recording) -> Written:
            self.begun.set()
            assert self.may_write.wait(60), "the training waited for the files"
            return write(recording)

        monkeypatch.setattr(Recording, "write", slow)


def test_the_training_goes_on_while_the_files_are_written(make_trainer, tmp_path: Path, monkeypatch, capsys):
    writes = SlowWrites(monkeypatch)
    dues = []
    at_12 = Remember(12, lambda trainer: dues.append(trainer.run.profiles.due))
    at_20 = Remember(20, lambda trainer: writes.may_write.set())
    make_trainer(profiler=fp.Profiler("4:6"), max_steps=22, callbacks=[at_12, at_20]).fit(Net(), batches())
    assert writes.begun.is_set()
    # No step asks while the files are written.
    assert dues == [math.inf]
    assert steps_in(tmp_path / "run/profile-4/trace-rank0.json.gz") == [4, 5]
    assert capsys.readouterr().out.count("Profile of steps 4 to 5, ") == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "footplate-profile"]


def test_fit_returns_when_the_files_are_written_also_after_an_error(make_trainer, tmp_path: Path, monkeypatch):
    writes = SlowWrites(monkeypatch)

    def fail(trainer: Any) -> None:
        threading.Timer(0.5, writes.may_write.set).start()
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        make_trainer(profiler=fp.Profiler("4:6"), max_steps=22, callbacks=Remember(9, fail)).fit(Net(), batches())
    assert writes.may_write.is_set()
    assert steps_in(tmp_path / "run/profile-4/trace-rank0.json.gz") == [4, 5]


def test_a_second_range_begins_when_the_first_is_written(make_trainer, tmp_path: Path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "7:9")
    trainer = make_trainer(profiler=fp.Profiler("4:6"), max_steps=12)
    trainer.fit(Net(), batches())
    assert steps_in(tmp_path / "run/profile-4/trace-rank0.json.gz") == [4, 5]
    assert steps_in(tmp_path / "run/profile-7/trace-rank0.json.gz") == [7, 8]
    threads = {
        event["tid"]
        for event in events(tmp_path / "run/profile-7/trace-rank0.json.gz")
        if "event_tree.py" in event["name"]
    }
    assert threads == set()
    assert_nothing_is_left(trainer)


def test_a_request_while_the_last_files_are_written_finds_no_training(make_trainer, monkeypatch):
    writes = SlowWrites(monkeypatch)
    failures = []

    class AtEnd(fp.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            assert writes.begun.wait(60)
            with pytest.raises(ConfigError, match=r"no Trainer\.fit runs in these processes now") as error:
                request_profile([os.getpid()], 2)
            failures.append(error)
            writes.may_write.set()

    make_trainer(profiler=fp.Profiler("4:6"), max_steps=6, callbacks=AtEnd()).fit(Net(), batches())
    assert len(failures) == 1

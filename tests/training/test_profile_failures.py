"""Profiles that end early or are given up, and ranges that are refused."""

from __future__ import annotations

import gc
import hashlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]

import footplate as fp
from footplate.core.errors import ConfigError
from footplate.core.profile_requests import VARIABLE
from footplate.training.profiler import torch_trace
from training.profiled_nets import Net, assert_nothing_is_left, batches, steps_in

pytestmark = pytest.mark.usefixtures("_warnings_are_seen")


def test_another_profiler_that_records_keeps_recording(make_trainer, caplog):
    training = make_trainer(max_steps=8, profiler=fp.Profiler("2:4"))
    with torch.profiler.profile() as own:
        training.fit(Net(), batches())
    assert "The profile was given up: RuntimeError: another torch.profiler records in this process" in caplog.text
    assert training.global_step == 8
    assert {event.key: event.count for event in own.key_averages()}["aten::addmm"] == 8


def test_steps_that_the_training_does_not_reach_are_warned_of(make_trainer, tmp_path: Path, caplog):
    make_trainer(max_steps=5, profiler="torch").fit(Net(), batches())
    assert "Profiler: the training ended after 5 steps, so the steps 10:20 were not recorded." in caplog.text
    assert not list((tmp_path / "run").glob("profile-*"))


def test_a_profile_that_the_training_ends_has_the_steps_so_far(make_trainer, tmp_path: Path, caplog):
    training = make_trainer(max_steps=5, profiler=fp.Profiler("3:100"))
    training.fit(Net(), batches())
    assert steps_in(tmp_path / "run/profile-3/trace-rank0.json.gz") == [3, 4]
    assert "Profiler: the training ended before step 100, so the profile has 2 steps." in caplog.text
    assert_nothing_is_left(training)


class Mistake(Exception):
    pass


class Breaks(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 4:
            raise Mistake("the user's own mistake")
        return super().training_step(batch, batch_idx)


def test_an_exception_in_a_recorded_step_comes_through_and_ends_the_profile(make_trainer, tmp_path: Path, caplog):
    training = make_trainer(max_steps=8, profiler=fp.Profiler("2:6"), enable_checkpointing=False)
    with pytest.raises(Mistake, match="the user's own mistake"):
        training.fit(Breaks(), batches())
    assert "The profile was given up: the training was interrupted." in caplog.text
    assert not list((tmp_path / "run").glob("profile-*"))
    assert not _profiler_enabled()
    assert sys.getprofile() is None

    # The next training in this process is profiled as usual.
    make_trainer(max_steps=4, profiler=fp.Profiler("1:3")).fit(Net(), batches())
    assert steps_in(tmp_path / "run/profile-1/trace-rank0.json.gz") == [1, 2]


@pytest.mark.parametrize(
    "steps",
    ["20:10", "10:10", "10", "10:20:30", "x:y", ":20", "-1:4", (10,), (3, 2), (1.5, 3), None, 10, True, ("a", "b")],
)
def test_a_bad_range_is_one_clear_error(steps: Any):
    with pytest.raises(ConfigError, match="expected the first step and the step after the last, such as"):
        fp.Profiler(steps)


def test_other_mistakes(make_trainer, monkeypatch):
    with pytest.raises(ConfigError, match='profiler="kineto": expected one of torch, simple, '):
        make_trainer(profiler="kineto")
    with pytest.raises(ConfigError, match=r"Profiler\(with_stack=1\): expected True or False"):
        fp.Profiler(with_stack=1)  # type: ignore[arg-type]
    monkeypatch.setenv(VARIABLE, "20:10")
    with pytest.raises(ConfigError, match=f"{VARIABLE}='20:10': expected the first step"):
        make_trainer(max_steps=2).fit(Net(), batches())


def test_torch_begins_to_record_when_no_other_thread_runs_and_collects_no_garbage(monkeypatch):
    monkeypatch.setattr(torch_trace, "_QUIET_S", 60.0)
    ended = threading.Event()

    def run_for_a_moment() -> None:
        _run_without_the_gil()
        ended.set()

    thread = threading.Thread(target=run_for_a_moment)
    thread.start()
    with torch_trace._undisturbed():
        assert ended.is_set()
        assert not gc.isenabled()
    assert gc.isenabled()
    thread.join()


def _run_without_the_gil() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000)


def test_torch_begins_to_record_if_another_thread_runs_forever():
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            _run_without_the_gil()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with torch_trace._undisturbed():
            assert thread.is_alive()
    finally:
        ends.set()
        thread.join()

"""Profiles on demand: requests to a training that runs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from footplate.core.errors import ConfigError, Unavailable
from footplate.core.profile_requests import request_profile, status_of, wait_for_profile
from training.profiled_nets import Net, Remember, assert_nothing_is_left, batches, steps_in


def test_a_training_is_profiled_on_demand(make_trainer, tmp_path: Path):
    requests = []
    ask = Remember(3, lambda trainer: requests.append(request_profile([os.getpid()], 2)))
    again = []

    def ask_again(trainer: Any) -> None:
        with pytest.raises(Unavailable, match="a profile is being made already"):
            request_profile([os.getpid()], 2)
        again.append(status_of(requests[0]).state)

    done = []
    look = Remember(8, lambda trainer: done.append(wait_for_profile(requests[0], lambda status: None)))
    make_trainer(max_steps=9, callbacks=[ask, Remember(5, ask_again), look]).fit(Net(), batches())
    # Step 3 is the warm-up.
    assert steps_in(tmp_path / "run/profile-4/trace-rank0.json.gz") == [4, 5]
    assert again == ["recording"]
    assert done[0].state == "done"
    assert done[0].directory == str(tmp_path / "run/profile-4")
    assert done[0].summary.startswith("Profile of steps 4 to 5")
    # The training is over, and the files tell.
    assert status_of(requests[0]).state == "done"


def test_a_request_just_before_the_end_fails_with_the_reason(make_trainer):
    requests = []
    ask = Remember(5, lambda trainer: requests.append(request_profile([os.getpid()], 2)))
    make_trainer(max_steps=5, callbacks=ask).fit(Net(), batches())
    status = status_of(requests[0])
    assert (status.state, status.error) == ("failed", f"process {os.getpid()} trains no more")


def test_a_process_that_does_not_train_cannot_be_profiled():
    with pytest.raises(ConfigError, match=r"no Trainer\.fit runs in these processes now"):
        request_profile([os.getpid()], 2)


@pytest.mark.slow
def test_twenty_requests_from_another_thread_each_get_their_steps(make_trainer, tmp_path: Path):
    class Endless(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.first(batch).mean()

    training = make_trainer(max_steps=-1, max_epochs=-1, enable_checkpointing=False)
    states, failures = [], []

    def ask() -> None:
        try:
            for _ in range(20):
                request = None
                while request is None:
                    try:
                        request = request_profile([os.getpid()], 2)
                    except ConfigError:  # it hasn't begun
                        time.sleep(0.01)
                states.append(wait_for_profile(request, lambda state: None))
        except BaseException as failure:
            failures.append(failure)
        training.should_stop = True

    asking = threading.Thread(target=ask)
    asking.start()
    training.fit(Endless(), batches())
    asking.join()
    assert not failures
    assert [status.state for status in states] == ["done"] * 20
    for status in states:
        first = int(status.directory.rpartition("-")[2])
        assert steps_in(Path(status.directory) / "trace-rank0.json.gz") == [first, first + 1]
    assert_nothing_is_left(training)

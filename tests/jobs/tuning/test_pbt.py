"""A tuning with population-based training, as its supervisor sees it, and with real trials."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from footplate.core.errors import ConfigError
from footplate.jobs.record import Fork
from footplate.jobs.states import State
from footplate.jobs.store.sqlite import SQLite
from footplate.jobs.tuning.results import training_output
from jobs.conftest import Bench
from jobs.tuning.checks import check_population
from jobs.tuning.conftest import Tuned, killed_at_write, line_of, submit_with


def submit(bench: Bench, trials: int = 6, parallel: int = 4, name: str = "tuned") -> Tuned:
    submit_with(bench, line_of(8, maxParallelTrials=parallel, maxTrials=trials), name, stop_early="pbt", seed=3)
    return Tuned(bench, name)


def begin_four(tuning: Tuned) -> None:
    for number in (1, 2, 3, 4):
        tuning.move_on()
        tuning.run(number)


def train(tuning: Tuned, number: int, *values: float, first: int = 1) -> Path:
    """Write what a trainer reports: a value at each step, and a checkpoint of the last one. Returns its directory."""
    folder = tuning.home.attempt(f"{tuning.name}_trial_{number}", 1)
    folder.mkdir(exist_ok=True)
    last = first + len(values) - 1
    path = tuning.bench.directory / f"trial-{number}-step-{last}.ckpt"
    path.mkdir(exist_ok=True)
    (path / "state.safetensors").write_text(f"the state of trial {number} at step {last}")
    lines = [
        {"step": first - 1, "training": "begins"},
        *({"step": step, "value": value} for step, value in enumerate(values, first)),
        {"step": last, "checkpoint": str(path)},
    ]
    (folder / "reports.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def start_of(tuning: Tuned, number: int) -> str:
    """The content of the checkpoint from which a fork begins."""
    return (
        Path(tuning.store.find(f"{tuning.name}_trial_{number}").plan["trial"]["checkpoint"]) / "state.safetensors"
    ).read_text()


def test_a_trial_in_the_worst_quarter_gives_way_to_a_fork_of_one_in_the_best(still: Bench):
    tuning = submit(still)
    begin_four(tuning)
    for number, value in ((1, 0.9), (2, 0.8), (3, 0.1)):
        train(tuning, number, value)
    tuning.move_on()
    assert tuning.states == ["ACTIVE"] * 4
    train(tuning, 4, 0.7)
    tuning.move_on()
    assert tuning.states == ["ACTIVE", "ACTIVE", "STOPPING", "ACTIVE"]
    # The tuning's supervisor may be killed meanwhile, and the parent trains on.
    tuning.begin()
    deleted = train(tuning, 1, 0.9, 0.95)
    tuning.end(3, State.CANCELLED)
    tuning.move_on()
    assert tuning.states == ["ACTIVE", "ACTIVE", "STOPPED_EARLY", "ACTIVE", "ACTIVE"]
    fork = tuning.trials[4]
    assert fork.fork == Fork(1, 2.0, 3)
    assert fork.parameters != tuning.trials[0].parameters
    # The checkpoint is the fork's, whatever its parent does.
    for file in deleted.iterdir():
        file.unlink()
    assert start_of(tuning, 5) == "the state of trial 1 at step 2"
    tuning.run(5)
    for number in (1, 2, 4):
        tuning.end(number)
    train(tuning, 5, 0.99, first=3)
    tuning.end(5)
    tuning.move_on()
    assert (tuning.attempt.over, tuning.attempt.succeeded) == (True, True)
    output = training_output(tuning.store, tuning.store.find("tuned"))
    assert output is not None
    best = output["bestTrial"]
    assert best["jobId"] == "tuned_trial_5"
    assert best["startCheckpoint"].endswith("/5/start.ckpt")
    assert [(each["trialId"], each["fromStep"]) for each in best["lineage"]] == [("1", 0.0), ("5", 2.0)]
    assert output["trials"][0]["cause"] == "from trial 1 at step 2, in the place of trial 3"
    assert (output["trials"][0]["parentTrialId"], output["trials"][0]["parentStep"]) == ("1", 2.0)


def test_no_trial_gives_way_before_a_better_one_has_a_checkpoint(still: Bench):
    tuning = submit(still)
    begin_four(tuning)
    for number, value in ((1, 0.9), (2, 0.8), (3, 0.1), (4, 0.7)):
        tuning.report(number, (1, value))
    tuning.move_on()
    assert tuning.states == ["ACTIVE"] * 4
    tuning.home.attempt("tuned_trial_1", 1).joinpath("hypertune.jsonl").unlink()
    train(tuning, 1, 0.9)
    tuning.move_on()
    assert tuning.states == ["ACTIVE", "ACTIVE", "STOPPING", "ACTIVE"]


def test_a_population_without_room_for_four_says_why_no_trial_gave_way(still: Bench):
    tuning = submit(still)
    for first in (1, 3):
        for number in (first, first + 1):
            tuning.move_on()
            tuning.run(number)
            train(tuning, number, 0.1 * number)
        for number in (first, first + 1):
            tuning.end(number)
    tuning.move_on()
    assert (tuning.attempt.over, tuning.attempt.succeeded) == (True, True)
    (log,) = (text for path in tuning.home.job("tuned").rglob("tuning.log") if (text := path.read_text()))
    assert "no trial gave way to a better one: trials are compared while they run" in log


def test_a_checkpoint_that_is_deleted_before_it_is_copied_is_replaced_by_a_newer_one(still: Bench):
    tuning = submit(still)
    begin_four(tuning)
    paths = [train(tuning, number, value) for number, value in ((1, 0.9), (2, 0.8), (3, 0.1), (4, 0.7))]
    tuning.move_on()
    tuning.end(3, State.CANCELLED)
    (paths[0] / "state.safetensors").unlink()
    paths[0].rmdir()
    tuning.move_on()
    assert (len(tuning.trials), tuning.attempt.failure) == (4, None)
    train(tuning, 1, 0.9, 0.95)
    tuning.move_on()
    assert tuning.trials[4].fork == Fork(1, 2.0, 3)


def test_no_more_trials_begin_than_may(still: Bench):
    tuning = submit(still, trials=5)
    begin_four(tuning)
    for number, value in ((1, 0.9), (2, 0.8), (3, 0.1), (4, 0.7)):
        train(tuning, number, value)
    tuning.move_on()
    tuning.end(3, State.CANCELLED)
    tuning.move_on()
    tuning.run(5)
    for number, values in ((1, (0.9, 0.9)), (2, (0.8, 0.8)), (4, (0.7, 0.7))):
        train(tuning, number, *values)
    train(tuning, 5, 0.1, first=2)
    tuning.move_on()
    assert tuning.states == ["ACTIVE", "ACTIVE", "STOPPED_EARLY", "ACTIVE", "ACTIVE"]
    for number in (1, 2, 4, 5):
        tuning.end(number)
    tuning.move_on()
    assert (tuning.attempt.over, len(tuning.trials)) == (True, 5)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_supervisor_may_be_killed_at_any_write_while_a_trial_is_replaced(
    still: Bench, monkeypatch: pytest.MonkeyPatch, after: bool
):
    transaction = SQLite.transaction

    def replace_third(tuning: Tuned) -> None:
        """Let the supervisor work until trial 3 is replaced. The test plays the supervisor of trial 3."""
        for _ in range(4):
            tuning.move_on()
            if tuning.store.state(f"{tuning.name}_trial_3") == State.CANCELLING:
                with monkeypatch.context() as plain:
                    plain.setattr(SQLite, "transaction", transaction)
                    tuning.end(3, State.CANCELLED)

    for kill_at in range(1_000):
        tuning = submit(still, name=f"killed_{kill_at}")
        begin_four(tuning)
        for number, value in ((1, 0.9), (2, 0.8), (3, 0.1), (4, 0.7)):
            train(tuning, number, value)
        with killed_at_write(monkeypatch, kill_at, after) as kill:
            replace_third(tuning)
        if kill.happened:
            tuning.begin()
            replace_third(tuning)
        assert tuning.states == ["ACTIVE", "ACTIVE", "STOPPED_EARLY", "ACTIVE", "ACTIVE"]
        assert [trial.fork for trial in tuning.trials] == [None, None, None, None, Fork(1, 1.0, 3)]
        assert start_of(tuning, 5) == "the state of trial 1 at step 1"
        if not kill.happened:
            break
    assert kill_at >= 3


def test_too_small_a_population_is_refused(still: Bench):
    with pytest.raises(
        ConfigError, match=r"compares the trials that run at once, and 3 is too few. Run at least 4 at once"
    ):
        submit(still, parallel=3)


@pytest.mark.slow
def test_a_population_trains_although_its_supervisor_is_killed(bench: Bench):
    check_population(bench)

"""A tuning as its supervisor sees it, with trials that the test runs itself."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from footplate.core.errors import ConfigError, MissingExtra
from footplate.jobs.record import Process, TrialState
from footplate.jobs.states import FINAL, State
from footplate.jobs.store.jobs import WrongState
from footplate.jobs.supervision.exit_status import outcome
from footplate.jobs.tuning.plan import TuningPlan, best_of
from jobs.conftest import Bench
from jobs.tuning.conftest import Tuned, grid, id_files, is_private, killed_at_write, line_of, submit_with, tuned


def to_the_end(tuning: Tuned) -> None:
    """Let each trial report its parameters as its result, one after the other, until the tuning is over."""
    for _ in range(50):
        tuning.move_on()
        if tuning.attempt.over:
            return
        for trial in tuning.trials:
            if tuning.store.state(trial.job) == State.QUEUED:
                tuning.run(trial.number)
                tuning.report(
                    trial.number, (1, float(trial.parameters["layers"]) + (trial.parameters["kind"] == "b") / 2)
                )
                tuning.end(trial.number)
    raise AssertionError("it never ended")


def test_trials_end_with_their_last_value_and_the_best_is_known(still: Bench):
    tuning = tuned(still)
    to_the_end(tuning)
    assert tuning.attempt.succeeded
    assert [(trial.value, trial.step) for trial in tuning.trials] == [(1.0, 1.0), (1.5, 1.0), (2.0, 1.0), (2.5, 1.0)]
    plan = TuningPlan.from_dict(still.jobs.store.find("tuned").plan["tuning"])
    best = best_of(plan, tuning.trials)
    assert best is not None
    assert best.job == "tuned_trial_4"
    assert still.jobs.store.find("tuned").cause == "4 of 10 trials have ended; the best: tuned_trial_4, accuracy=2.5"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_supervisor_may_be_killed_at_any_write_and_no_trial_is_lost_or_repeated(
    still: Bench, monkeypatch: pytest.MonkeyPatch, after: bool
):
    text = grid(maxTrials=2)
    plain = tuned(still, text, "plain")
    to_the_end(plain)
    expected = [(trial.parameters, trial.value, trial.state) for trial in plain.trials]
    for kill_at in range(1_000):
        name = f"killed_{kill_at}"
        tuning = tuned(still, text, name)
        with killed_at_write(monkeypatch, kill_at, after) as kill:
            to_the_end(tuning)
        if kill.happened:
            repair(tuning)
            tuning.begin()
            to_the_end(tuning)
        assert [(trial.parameters, trial.value, trial.state) for trial in tuning.trials] == expected
        jobs = {job.name for job in still.jobs.store.list() if job.name.startswith(f"{name}_trial_")}
        assert jobs == {trial.job for trial in tuning.trials}
        for trial in tuning.trials:
            assert id_files(still, trial.job) == [still.jobs.store.find(trial.job).id]
        if not kill.happened:
            break
    assert kill_at > 10


def resubmitted(bench: Bench) -> Tuned:
    """The tuning after its cancellation has ended and it was submitted again."""
    now = time.time()
    bench.jobs.store.move("tuned", State.RUNNING, State.CANCELLING, now)
    bench.jobs.store.move("tuned", State.CANCELLING, State.CANCELLED, now, ended=now)
    bench.jobs.resubmit("tuned")
    again = Tuned(bench)
    again.move_on()
    return again


def repair(tuning: Tuned) -> None:
    """Bring the job of a trial to the end that the kill of the test, which also plays the trials, has interrupted."""
    for trial in tuning.trials:
        state = tuning.store.state(trial.job)
        if state in (State.PREPARING, State.RUNNING):
            if state == State.PREPARING:
                tuning.store.move(trial.job, state, State.RUNNING, time.time(), started=time.time())
            tuning.report(trial.number, (1, float(trial.parameters["layers"]) + (trial.parameters["kind"] == "b") / 2))
            tuning.end(trial.number)


def test_no_more_trials_run_at_once_than_may_and_one_waits_for_room(still: Bench):
    tuning = tuned(still, grid(maxParallelTrials=2, maxTrials=3))
    assert len(tuning.move_on()) == 1
    # The first one still waits in the queue: parameters are chosen late.
    assert len(tuning.move_on()) == 1
    tuning.run(1)
    assert len(tuning.move_on()) == 2
    tuning.run(2)
    assert len(tuning.move_on()) == 2
    for number in (1, 2):
        tuning.report(number, (1, 1))
        tuning.end(number)
    assert len(tuning.move_on()) == 3
    tuning.run(3)
    tuning.report(3, (1, 1))
    tuning.end(3)
    assert len(tuning.move_on()) == 3
    assert tuning.attempt.over


def test_a_trial_gets_the_files_of_its_tuning_and_a_folder_that_a_crash_left_is_replaced(still: Bench):
    tuning = tuned(still)
    folder = tuning.home.job("tuned_trial_1")
    folder.mkdir(parents=True)
    (folder / "tuned_trial_1-17").touch()
    tuning.move_on()
    assert id_files(still, "tuned_trial_1") == [still.jobs.store.find("tuned_trial_1").id]
    for name in ("package", "environment.json"):
        assert (folder / name).read_text() == (tuning.home.job("tuned") / name).read_text()
    assert is_private(folder / "environment.json")


def test_failed_trials_end_a_tuning_when_as_many_failed_as_may(still: Bench):
    tuning = tuned(still, grid(maxFailedTrials=2, maxParallelTrials=3))
    for number in (1, 2, 3):
        tuning.move_on()
        tuning.run(number)
    tuning.report(1, (1, 1))
    tuning.end(1)
    tuning.end(2, State.FAILED, "master 0 ended with exit code 1")
    tuning.move_on()
    assert not tuning.attempt.failure
    tuning.run(4)
    tuning.end(3, State.FAILED, "master 0 ended with exit code 2")
    tuning.move_on()
    tuning.move_on()
    assert str(tuning.attempt.failure) == (
        "2 trials failed, and maxFailedTrials is 2. The last: master 0 ended with exit code 2"
    )
    # The trial that runs is cancelled, and the tuning waits for it.
    assert (still.jobs.store.state("tuned_trial_4"), tuning.attempt.over) == (State.CANCELLING, False)
    tuning.end(4, State.CANCELLED)
    tuning.move_on()
    assert (tuning.attempt.over, tuning.attempt.succeeded) == (True, False)


def test_without_a_limit_only_a_program_that_never_works_ends_a_tuning(still: Bench):
    works = tuned(still, name="works")
    for number in (1, 2, 3, 4):
        works.move_on()
        works.run(number)
        works.report(number, *([(1, 1)] if number == 1 else []))
        works.end(number, State.SUCCEEDED if number == 1 else State.FAILED, "broken")
    works.move_on()
    assert (works.states, works.attempt.succeeded) == (["SUCCEEDED", "FAILED", "FAILED", "FAILED"], True)
    broken = tuned(still, name="broken")
    for number in (1, 2, 3):
        broken.move_on()
        broken.run(number)
        broken.end(number, State.FAILED, "ended with exit code 2")
    broken.move_on()
    broken.move_on()
    assert str(broken.attempt.failure) == "3 trials failed, and none has a result. The last: ended with exit code 2"
    assert broken.attempt.over


def test_a_resubmission_forgives_the_failures(still: Bench):
    tuning = tuned(still, grid(maxFailedTrials=1))
    tuning.move_on()
    tuning.run(1)
    tuning.end(1, State.FAILED, "no memory")
    tuning.move_on()
    assert tuning.attempt.failure
    now = time.time()
    still.jobs.store.move("tuned", State.RUNNING, State.FAILED, now, ended=now)
    still.jobs.resubmit("tuned")
    again = Tuned(still)
    to_the_end(again)
    assert (again.states, again.attempt.succeeded) == (["FAILED", "SUCCEEDED", "SUCCEEDED", "SUCCEEDED"], True)


def test_a_trial_without_the_metric_has_failed_and_the_cause_names_what_it_logged(still: Bench):
    tuning = tuned(still)
    tuning.move_on()
    tuning.run(1)
    tuning.report(1, (1, 0.5), tag="acc")
    folder = tuning.home.attempt("tuned_trial_1", 1)
    (folder / "reports.jsonl").write_text('{"step": 1, "logged": ["train_loss", "acc"]}\n')
    tuning.end(1)
    trial = tuning.move_on()[0]
    assert trial.state == TrialState.FAILED
    assert trial.cause == (
        'it ended without a value of "accuracy", its hyperparameterMetricTag. It logged acc, train_loss. Log that metric '
        "with self.log, or report it with cloudml-hypertune."
    )


def test_parameters_that_let_a_training_diverge_are_infeasible_and_no_failure(still: Bench):
    tuning = tuned(still, grid(maxFailedTrials=1))
    tuning.move_on()
    tuning.run(1)
    tuning.report(1, (1, 0.5), (2, float("nan")))
    tuning.end(1)
    trial = tuning.move_on()[0]
    assert (trial.state, trial.value, trial.cause) == (TrialState.INFEASIBLE, None, "accuracy is nan at step 2")
    assert not tuning.attempt.failure


def test_what_a_rolled_back_attempt_reported_does_not_count(still: Bench):
    tuning = tuned(still)
    tuning.move_on()
    tuning.run(1)
    tuning.report(1, (1, 0.1), (2, 0.2), (3, 0.99))
    still.jobs.store.move("tuned_trial_1", State.RUNNING, State.PREPARING, time.time(), attempt=2)
    tuning.run(1)
    tuning.report(1, (2, 0.3), attempt=2)
    tuning.end(1)
    trial = tuning.move_on()[0]
    assert (trial.measurements, trial.value) == (((1.0, 0.1), (2.0, 0.3)), 0.3)


def test_a_stop_cancels_the_trials_and_a_resubmission_continues_them(still: Bench):
    tuning = tuned(still, grid(maxParallelTrials=3))
    for number in (1, 2):
        tuning.move_on()
        tuning.run(number)
    tuning.move_on()
    tuning.attempt.stop(30.0)
    tuning.move_on()
    states = [still.jobs.store.state(trial.job) for trial in tuning.trials]
    assert states == [State.CANCELLING, State.CANCELLING, State.CANCELLED]
    tuning.end(1, State.CANCELLED)
    # One trial had already done its work.
    tuning.report(2, (1, 0.5))
    still.jobs.store.move("tuned_trial_2", State.CANCELLING, State.CANCELLED, time.time(), ended=time.time())
    tuning.move_on()
    assert (tuning.states, tuning.attempt.over) == (["PAUSED"] * 3, True)
    again = resubmitted(still)
    assert again.states == ["ACTIVE"] * 3
    assert {still.jobs.store.state(trial.job) for trial in again.trials} == {State.QUEUED}
    to_the_end(again)
    assert again.states == ["SUCCEEDED"] * 4


def test_a_trial_that_its_user_cancels_or_deletes_counts_as_no_result(still: Bench):
    tuning = tuned(still, grid(maxFailedTrials=2))
    tuning.move_on()
    still.jobs.cancel("tuned_trial_1")
    assert tuning.move_on()[0].state == TrialState.CANCELLED
    still.jobs.cancel("tuned_trial_2")
    still.jobs.delete("tuned_trial_2")
    trial = tuning.move_on()[1]
    assert (trial.state, trial.cause) == (TrialState.FAILED, "its job tuned_trial_2 was deleted")


def test_an_unpromising_trial_is_stopped_early_and_is_no_failure(still: Bench):
    tuning = tuned(still, grid(enableTrialEarlyStopping="true", maxFailedTrials=1))
    for number in (1, 2, 3):
        tuning.move_on()
        tuning.run(number)
        tuning.report(number, (1, 0.5), (2, 0.6))
        tuning.end(number)
    tuning.move_on()
    tuning.run(4)
    tuning.report(4, (1, 0.6))
    assert tuning.move_on()[3].measurements == ((1.0, 0.6),)
    tuning.report(4, (1, 0.1), (2, 0.2))
    tuning.move_on()
    assert (tuning.states[3], tuning.store.state("tuned_trial_4")) == ("STOPPING", State.CANCELLING)
    # Its supervisor lets the program save, and the tuning's supervisor may be killed meanwhile.
    tuning.begin()
    tuning.move_on()
    assert not tuning.attempt.over
    tuning.report(4, (1, 0.1), (2, 0.2), (3, 0.9))
    tuning.end(4, State.CANCELLED)
    trial = tuning.move_on()[3]
    assert (str(trial.state), trial.value, trial.step) == ("STOPPED_EARLY", 0.9, 3.0)
    assert trial.cause == "at step 2 its best accuracy is 0.2, and the median of 3 trials is 0.55"
    assert (tuning.attempt.over, tuning.attempt.succeeded) == (True, True)
    assert still.jobs.store.find("tuned").cause.endswith("the best: tuned_trial_1, accuracy=0.6")


def asha(bench: Bench, trials: int) -> Tuned:
    """A tuning with successive halving, four trials at once."""
    submit_with(bench, line_of(trials, maxParallelTrials=4, maxTrials=trials), stop_early="asha")
    return Tuned(bench)


def test_a_trial_that_misses_the_cut_is_paused_and_continues_when_it_makes_it(still: Bench):
    tuning = asha(still, 6)
    for number in (1, 2, 3, 4):
        tuning.move_on()
        tuning.run(number)
    # Alone at the first rung.
    tuning.report(1, (1, 0.5))
    tuning.move_on()
    assert tuning.states == ["ACTIVE"] * 4
    tuning.report(2, (1, 0.4))
    tuning.report(3, (1, 0.3))
    tuning.move_on()
    assert tuning.states == ["ACTIVE", "PAUSING", "PAUSING", "ACTIVE"]
    assert tuning.store.state("tuned_trial_2") == State.CANCELLING
    # The supervisor may be killed meanwhile. Paused trials leave room for others.
    tuning.end(2, State.CANCELLED)
    tuning.end(3, State.CANCELLED)
    tuning.begin()
    for number in (5, 6):
        tuning.move_on()
        tuning.run(number)
    assert tuning.states == ["ACTIVE", "PAUSED", "PAUSED", "ACTIVE", "ACTIVE", "ACTIVE"]
    assert tuning.trials[1].cause == "at step 1, measurement 1, its accuracy 0.4 is number 2 of 3"
    assert tuning.store.find("tuned_trial_2").cause == f"paused: {tuning.trials[1].cause}"
    for number in (4, 5, 6):
        tuning.report(number, (1, number / 100))
    tuning.move_on()
    for number in (4, 5, 6):
        tuning.end(number, State.CANCELLED)
    tuning.move_on()
    # The second of six makes the cut, the third doesn't.
    tuning.move_on()
    assert tuning.states == ["ACTIVE", "ACTIVE", "PAUSED", "PAUSED", "PAUSED", "PAUSED"]
    assert tuning.store.state("tuned_trial_2") == State.QUEUED
    tuning.run(2, attempt=2)
    tuning.report(2, (2, 0.9), attempt=2)
    tuning.end(2)
    tuning.end(1)
    tuning.move_on()
    assert tuning.states == ["SUCCEEDED", "SUCCEEDED", *["STOPPED_EARLY"] * 4]
    assert tuning.trials[1].measurements == ((1.0, 0.4), (2.0, 0.9))
    assert (tuning.attempt.over, tuning.attempt.succeeded) == (True, True)


def test_a_tuning_that_is_cancelled_keeps_its_paused_trials(still: Bench):
    tuning = asha(still, 4)
    for number in (1, 2, 3, 4):
        tuning.move_on()
        tuning.run(number)
    for number in (1, 2, 3):
        tuning.report(number, (1, number / 10))
    tuning.move_on()
    tuning.end(1, State.CANCELLED)
    tuning.move_on()
    assert tuning.states == ["PAUSED", "PAUSING", "ACTIVE", "ACTIVE"]
    tuning.attempt.stop(30.0)
    tuning.move_on()
    for number in (2, 3, 4):
        tuning.end(number, State.CANCELLED)
    tuning.move_on()
    assert (tuning.states, tuning.attempt.over) == (["PAUSED"] * 4, True)
    again = resubmitted(still)
    assert again.states == ["PAUSED", "PAUSED", "ACTIVE", "ACTIVE"]


def test_a_trial_that_ends_while_it_is_stopped_has_its_result(still: Bench, monkeypatch: pytest.MonkeyPatch):
    tuning = tuned(still, grid(enableTrialEarlyStopping="true"))
    tuning.move_on()
    tuning.run(1)
    tuning.report(1, (1, float("nan")))
    # The job has ended by the time it is to be cancelled.
    monkeypatch.setattr("footplate.jobs.tuning.attempt.end_job", lambda *_: True)
    tuning.move_on()
    tuning.report(1, (1, float("nan")), (2, 0.7))
    tuning.end(1)
    trial = tuning.move_on()[0]
    assert (str(trial.state), trial.value) == ("SUCCEEDED", 0.7)


def train_to_the_end(tuning: Tuned, number: int, *values: float) -> None:
    """Write what a trainer reports that has trained to its end."""
    folder = tuning.home.attempt(f"tuned_trial_{number}", 1)
    folder.mkdir(exist_ok=True)
    lines = [
        {"step": 0, "training": "begins"},
        *({"step": step, "value": value} for step, value in enumerate(values, 1)),
        {"step": len(values), "training": "ends"},
    ]
    (folder / "reports.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def two_of_asha(bench: Bench) -> Tuned:
    """Two trials that run, of which the first is the better one."""
    tuning = asha(bench, 2)
    for number in (1, 2):
        tuning.move_on()
        tuning.run(number)
    tuning.report(1, (1, 0.9))
    return tuning


def test_a_trial_that_has_trained_to_its_end_is_not_paused(still: Bench):
    tuning = two_of_asha(still)
    train_to_the_end(tuning, 2, 0.1)
    tuning.move_on()
    assert tuning.states == ["ACTIVE", "ACTIVE"]
    tuning.end(2)
    tuning.move_on()
    assert (tuning.states[1], tuning.trials[1].value) == ("SUCCEEDED", 0.1)


@pytest.mark.parametrize("value", [0.1, float("nan")], ids=["paused", "stopped"])
@pytest.mark.parametrize("code", [0, 143])
def test_a_program_that_ends_with_success_although_it_was_asked_to_save_has_done_its_work(
    still: Bench, code: int, value: float
):
    tuning = two_of_asha(still)
    tuning.report(2, (1, value))
    tuning.move_on()
    assert tuning.states == ["ACTIVE", "PAUSING" if value == 0.1 else "STOPPING"]
    # Its last report comes after the request. The tuning's supervisor may be killed meanwhile.
    tuning.report(2, (1, value), (2, 0.3))
    process = Process(1, "master", 0, 17, 1.0, time.time())
    tuning.store.begin_processes("tuned_trial_2", [process])
    tuning.store.end_processes("tuned_trial_2", [replace(process, ended=time.time(), outcome=outcome(code, ""))])
    tuning.begin()
    tuning.end(2, State.CANCELLED)
    tuning.move_on()
    if code == 0:
        assert (tuning.states[1], tuning.trials[1].value) == ("SUCCEEDED", 0.3)
        assert tuning.store.find("tuned_trial_2").cause == "its program ended by itself"
    else:
        assert tuning.states[1] == ("PAUSED" if value == 0.1 else "STOPPED_EARLY")


def test_a_program_that_sigterm_ends_after_its_training_goes_on_and_has_its_result(still: Bench):
    tuning = two_of_asha(still)
    tuning.report(2, (1, 0.1))
    tuning.move_on()
    assert tuning.states == ["ACTIVE", "PAUSING"]
    (tuning.home.attempt("tuned_trial_2", 1) / "hypertune.jsonl").unlink()
    train_to_the_end(tuning, 2, 0.1)
    tuning.end(2, State.CANCELLED)
    tuning.move_on()
    assert (tuning.states[1], tuning.store.state("tuned_trial_2")) == ("ACTIVE", State.QUEUED)
    tuning.run(2, attempt=2)
    tuning.move_on()
    assert tuning.states[1] == "ACTIVE"
    tuning.end(2)
    tuning.move_on()
    assert (tuning.states[1], tuning.trials[1].value) == ("SUCCEEDED", 0.1)


def test_measurements_that_cloudml_hypertune_no_longer_keeps_are_remembered(still: Bench):
    tuning = tuned(still, grid(enableTrialEarlyStopping="true"))
    tuning.move_on()
    tuning.run(1)
    tuning.report(1, (1, 0.1), (2, 0.2))
    tuning.move_on()
    tuning.report(1, (2, 0.2), (3, 0.3))
    tuning.end(1)
    assert tuning.move_on()[0].measurements == ((1.0, 0.1), (2.0, 0.2), (3.0, 0.3))


@pytest.mark.parametrize("error", [MissingExtra("no Optuna"), ZeroDivisionError("in the sampler")])
def test_a_search_that_fails_ends_the_tuning_when_its_trials_have_ended(
    still: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    tuning = tuned(still, grid(maxParallelTrials=2))
    tuning.move_on()
    tuning.run(1)

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("footplate.jobs.tuning.attempt.propose", fails)
    tuning.move_on()
    assert str(error) in str(tuning.attempt.failure)
    tuning.move_on()
    assert (tuning.store.state("tuned_trial_1"), tuning.attempt.over) == (State.CANCELLING, False)
    tuning.end(1, State.CANCELLED)
    tuning.move_on()
    assert (tuning.attempt.over, tuning.attempt.succeeded) == (True, False)


def test_a_store_that_is_away_for_a_while_is_no_failure(still: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("footplate.jobs.tuning.attempt.AWAY_S", 0.0)
    tuning = tuned(still)
    with monkeypatch.context() as patch:
        patch.setattr(tuning.store.trials, "_database", Away())
        assert tuning.attempt.wait(0.0) == []
    assert not tuning.attempt.failure
    to_the_end(tuning)
    assert tuning.attempt.succeeded


class Away:
    """A database that can't be used."""

    def read(self, sql: str, *values: Any) -> Any:
        from footplate.core.errors import Unavailable

        raise Unavailable("the server doesn't answer")


def test_a_tuning_continues_another_one_and_repeats_none_of_its_trials(still: Bench):
    first = tuned(still, grid(maxTrials=2))
    to_the_end(first)
    now = time.time()
    still.jobs.store.move("tuned", State.RUNNING, State.SUCCEEDED, now, ended=now)
    second = tuned(still, grid(resumePreviousJobId="tuned", maxTrials=1), "again")
    to_the_end(second)
    assert [trial.parameters for trial in second.trials] == [{"layers": 2, "kind": "a"}]
    still.jobs.store.move("again", State.RUNNING, State.SUCCEEDED, now, ended=now)
    still.jobs.delete("tuned")
    third = tuned(still, grid(resumePreviousJobId="again"), "third")
    to_the_end(third)
    assert [trial.parameters for trial in third.trials] == [{"layers": 2, "kind": "b"}]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"resumePreviousJobId": "nothing"}, "resumePreviousJobId: nothing is no tuning in this store"),
        ({"resumePreviousJobId": "tuned"}, "resumePreviousJobId: tuned is RUNNING: wait until it ends"),
    ],
)
def test_a_tuning_that_cannot_be_continued_is_refused(still: Bench, keys: dict[str, Any], message: str):
    tuned(still)
    with pytest.raises(ConfigError, match=message):
        tuned(still, grid(**keys), "again")


def test_results_count_only_for_the_same_goal_metric_and_parameters(still: Bench):
    tuned(still)
    now = time.time()
    still.jobs.store.move("tuned", State.RUNNING, State.FAILED, now, ended=now)
    with pytest.raises(ConfigError, match="has other goal: MINIMIZE here, MAXIMIZE there"):
        tuned(still, grid(resumePreviousJobId="tuned", goal="MINIMIZE"), "again")
    with pytest.raises(ConfigError, match="has other hyperparameterMetricTag: loss here, accuracy there"):
        tuned(still, grid(resumePreviousJobId="tuned", hyperparameterMetricTag="loss"), "again")


def test_the_names_of_trials_must_be_free_and_short_enough(still: Bench):
    still.submit("tuned_trial_3")
    with pytest.raises(
        WrongState, match="there is a job tuned_trial_3 already, and a trial of tuned would have its name"
    ):
        tuned(still)
    with pytest.raises(ConfigError, match="would be longer than 128 characters"):
        tuned(still, name="x" * 120)


def test_a_tuning_is_deleted_with_its_trials(still: Bench):
    tuning = tuned(still, grid(maxTrials=2))
    to_the_end(tuning)
    with pytest.raises(WrongState, match="tuned is RUNNING"):
        still.jobs.delete("tuned")
    assert {job.state for job in still.jobs.store.list()} == {State.RUNNING, State.SUCCEEDED}
    now = time.time()
    still.jobs.store.move("tuned", State.RUNNING, State.SUCCEEDED, now, ended=now)
    still.jobs.delete("tuned")
    assert still.jobs.store.list() == []
    assert tuning.trials == []


def test_the_trials_of_a_lost_machine_are_cancelled_with_their_tuning(still: Bench, monkeypatch: pytest.MonkeyPatch):
    tuning = tuned(still)
    tuning.move_on()
    tuning.run(1)
    monkeypatch.setattr("footplate.jobs.backends.local.machine.host", lambda: "another")
    still.jobs.cancel("tuned", machine_lost=True)
    assert {job.state for job in still.jobs.store.list()} <= set(FINAL)

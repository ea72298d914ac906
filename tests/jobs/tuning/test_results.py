"""The results of a tuning in a program and in a notebook."""

from __future__ import annotations

import re

import pytest

from footplate.core.errors import ConfigError
from footplate.jobs import job_html
from footplate.jobs.states import State
from footplate.jobs.store.jobs import UnknownJob
from jobs.conftest import Bench
from jobs.tuning.conftest import Tuned, line_of, tuned


def three_trials(bench: Bench) -> Tuned:
    """A tuning with two results, of which the second is the better one, and a trial that runs."""
    tuning = tuned(bench, line_of(4))
    for number, value in ((1, 0.5), (2, 0.75)):
        tuning.move_on()
        tuning.run(number)
        tuning.report(number, (10, value))
        tuning.end(number)
    tuning.move_on()
    tuning.run(3)
    return tuning


def trial_rows(shown: str) -> list[list[str]]:
    """The cells of the table of trials."""
    return [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr><td.*</tr>", shown)]


def test_a_program_gets_the_trials_the_best_first(still: Bench):
    three_trials(still)
    tuning = still.jobs.tuning("tuned")
    assert [(trial.number, trial.parameters, trial.value) for trial in tuning.trials] == [
        (2, {"layers": 2}, 0.75),
        (1, {"layers": 1}, 0.5),
        (3, {"layers": 3}, None),
    ]
    assert tuning.running == {"tuned_trial_3": State.RUNNING}
    assert tuning.best is not None
    assert (tuning.best.job, tuning.best.value) == ("tuned_trial_2", 0.75)


def test_a_notebook_shows_the_trials_as_a_table_the_best_first(still: Bench):
    three_trials(still)
    shown = still.jobs.tuning("tuned")._repr_html_()
    assert trial_rows(shown) == [
        ["2", "SUCCEEDED", "0.75", "10", "2"],
        ["1", "SUCCEEDED", "0.5", "10", "1"],
        ["3", "RUNNING", "", "", "3"],
    ]
    assert ">accuracy<" in shown
    assert ">layers<" in shown
    assert "The best is tuned_trial_2, accuracy=0.75: --layers=2" in shown


def test_of_many_trials_a_notebook_shows_the_best(still: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_html, "TRIALS", 2)
    three_trials(still)
    shown = still.jobs.tuning("tuned")._repr_html_()
    assert [row[0] for row in trial_rows(shown)] == ["2", "1"]
    assert "1 more trials" in shown


def test_a_tuning_without_trials_says_so(still: Bench):
    tuned(still)
    shown = still.jobs.tuning("tuned")._repr_html_()
    assert "0 of 10 trials have ended. None has a result yet." in shown


def test_another_job_has_no_trials(still: Bench):
    still.submit("plain")
    with pytest.raises(ConfigError, match="plain has no trials: it was submitted without hyperparameters"):
        still.jobs.tuning("plain")
    with pytest.raises(UnknownJob):
        still.jobs.tuning("nobody")

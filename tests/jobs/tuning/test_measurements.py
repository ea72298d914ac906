from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.jobs.tuning.measurements import has_trained, read_reports, series

STEPS = st.integers(0, 20).map(float)
EVENTS = st.lists(st.tuples(STEPS, st.floats(-1, 1)) | STEPS, max_size=8)


@given(st.lists(EVENTS, max_size=4))
def test_the_steps_of_a_series_increase(attempts: list[list[tuple[float, float] | float]]):
    assert all(before[0] < after[0] for before, after in pairwise(series(attempts)))


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30), st.lists(st.integers(0, 29), max_size=4))
def test_a_training_that_is_killed_and_continued_has_the_series_of_one_that_was_not(
    values: list[float], kills: list[int]
):
    whole = [(float(step), value) for step, value in enumerate(values)]
    attempts: list[list[tuple[float, float] | float]] = []
    begin = 0
    for kill in kills:
        # It was killed after some more steps, and its newest checkpoint was at `begin` or later.
        end = min(len(values), begin + kill)
        attempts.append([*([begin - 1.0] if begin else []), *((step, value + 7.0) for step, value in whole[begin:end])])
        attempts[-1] = [
            *attempts[-1][: 1 if begin else 0],
            *whole[begin : (begin + end) // 2],
            *_wrong(whole, begin, end),
        ]
        begin = (begin + end) // 2
    attempts.append([*([begin - 1.0] if begin else []), *whole[begin:]])
    assert series(attempts) == tuple(whole)


def _wrong(whole: list[tuple[float, float]], begin: int, end: int) -> list[tuple[float, float] | float]:
    """What an attempt reported after its last checkpoint; on another machine, it might have come out otherwise."""
    return [(step, value + 7.0) for step, value in whole[(begin + end) // 2 : end]]


def test_a_later_attempt_counts_from_its_first_report_on():
    assert series([[(1.0, 0.1), (2.0, 0.2), (3.0, 0.9)], [(2.0, 0.3)]]) == ((1.0, 0.1), (2.0, 0.3))


def test_an_attempt_that_had_nothing_left_to_report_keeps_what_is_there():
    assert series([[(1.0, 0.1), (2.0, 0.2)], []]) == ((1.0, 0.1), (2.0, 0.2))


def test_a_trainer_says_where_it_continues():
    assert series([[(1.0, 0.1), (2.0, 0.2), (3.0, 0.9)], [2.0]]) == ((1.0, 0.1), (2.0, 0.2))


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([], False),
        ([[("begins", 0.0)]], False),
        ([[("begins", 0.0), ("ends", 9.0)]], True),
        # Its newest checkpoint is of its end, or an earlier one.
        ([[("begins", 0.0), ("ends", 9.0)], [("continues", 9.0)]], True),
        ([[("begins", 0.0), ("ends", 9.0)], [("continues", 6.0)]], False),
        # The next of several trainings.
        ([[("begins", 0.0), ("ends", 9.0), ("begins", 9.0)]], False),
        ([[("begins", 0.0), ("ends", 9.0), ("begins", 9.0), ("ends", 9.0)]], True),
    ],
)
def test_a_trial_has_trained_when_its_last_training_has_reached_its_end(
    attempts: list[list[tuple[str, float]]], expected: bool
):
    assert has_trained(attempts) == expected


def test_another_training_of_the_program_begins_another_series():
    assert series([[(1.0, 0.1), (2.0, 0.2), (1.0, 0.5), (2.0, 0.6), (3.0, 0.7)]]) == (
        (1.0, 0.5),
        (2.0, 0.6),
        (3.0, 0.7),
    )


def test_an_evaluation_after_training_replaces_the_value_of_its_step():
    assert series([[(1.0, 0.1), (2.0, 0.2), (2.0, 0.25)]]) == ((1.0, 0.1), (2.0, 0.25))


def test_reports_of_cloudml_hypertune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import hypertune

    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(tmp_path / "hypertune.jsonl"))
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "3")
    reporter = hypertune.HyperTune()
    for step in range(120):
        reporter.report_hyperparameter_tuning_metric("accuracy", metric_value=step / 2, global_step=step)
    reporter.report_hyperparameter_tuning_metric("loss", metric_value=float("inf"), global_step=9)
    # It keeps the last hundred.
    assert read_reports(tmp_path, "accuracy").events == [(float(step), step / 2) for step in range(21, 120)]
    assert read_reports(tmp_path, "loss").events == [(9.0, float("inf"))]
    assert read_reports(tmp_path, "other").events == []


def test_a_damaged_or_growing_file_gives_its_complete_lines(tmp_path: Path):
    lines = [
        json.dumps({"accuracy": "0.5", "global_step": "1"}), "", "not json", "[1, 2]", '{"accuracy": null}',
        '{"accuracy": "high", "global_step": "2"}', '{"accuracy": true, "global_step": "2"}',
        '{"accuracy": "nan", "global_step": "3"}', '{"accuracy": "0.9", "global_step": "4"}',
    ]  # fmt: skip
    (tmp_path / "hypertune.jsonl").write_text("\n".join(lines))
    (first, second) = read_reports(tmp_path, "accuracy").events
    assert first == (1.0, 0.5)
    assert str(second) == "(3.0, nan)"


def test_reports_of_a_trainer_and_the_metrics_that_it_logged_instead(tmp_path: Path):
    lines = ['{"step": 5, "logged": ["train_loss"]}', '{"step": 5, "value": null}', '{"step": 9, "value": "nan"}']
    (tmp_path / "reports.jsonl").write_text("".join(f"{line}\n" for line in lines))
    reports = read_reports(tmp_path, "accuracy")
    assert str(reports.events) == "[5.0, (9.0, nan)]"
    assert reports.names == {"train_loss"}
    # What the program reports on purpose counts more.
    (tmp_path / "hypertune.jsonl").write_text('{"accuracy": "0.5", "global_step": "1"}\n')
    assert read_reports(tmp_path, "accuracy").events == [(1.0, 0.5)]

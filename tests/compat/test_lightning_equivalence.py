"""The same LightningModule, seed and batches under Lightning's trainer and ours: all visible results are equal.

Weights and learning rates are equal bit for bit. Hooks are called in the same order and see the same epoch, step and batch.
Loggers receive the same values (to float32's last digits: we keep means in float64). `DIFFERENT` and
docs/reference/lightning-differences.md list the intended differences. A case listed there that no longer differs fails, so
neither list can become outdated.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from models.cases import CASES, EVALUATED, WITH_CALLBACKS
from models.recording import Case, Record, Row, evaluate, train

DIFFERENT = {
    # "frequency" counts optimizer steps of the run (Lightning: batches of the epoch).
    "schedule every third step": {"weights", "rates", "rows", "callback_metrics"},
    "schedule every third step, accumulation": {"weights", "rates", "rows", "callback_metrics"},
    # Single batches of an evaluation aren't reported.
    "validation logs by step": {"rows"},
    # Only at its end is it known where a loader of unknown length ends: its last, partial window is stepped afterwards.
    "length unknown, accumulation": {"events"},
    # A window whose batches were all skipped is no step.
    "skipped batches": {"events", "rows", "step"},
    "skipped batches, accumulation": {"events", "rows", "step"},
    # A run that is stopped inside an epoch stays in it, and can be taken up there (Lightning: the epoch counts as over).
    "max steps inside an epoch": {"events", "epoch"},
    "max steps with accumulation": {"events", "epoch"},
    "stops itself": {"events", "epoch"},
    # Gradients that are pending in manual optimisation survive validation, and batches without a step aren't reported.
    "accumulation by hand": {"weights", "rows", "callback_metrics"},
}


@pytest.mark.parametrize("case", [*CASES, *WITH_CALLBACKS], ids=lambda case: case.name)
def test_training_is_the_same(case: Case, tmp_path: Path) -> None:
    theirs = train(case, "lightning", tmp_path / "lightning")
    ours = train(case, "footplate", tmp_path / "footplate")

    assert differences(theirs, ours) == DIFFERENT.get(case.name, set())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("case", EVALUATED, ids=lambda case: case.name)
def test_evaluation_is_the_same(case: Case, stage: str, tmp_path: Path) -> None:
    theirs, their_result = evaluate(case, "lightning", stage, tmp_path / "lightning")
    ours, our_result = evaluate(case, "footplate", stage, tmp_path / "footplate")

    assert ours.events == theirs.events
    assert len(our_result) == len(their_result) > 0
    for mine, their in zip(flat(our_result), flat(their_result), strict=True):
        if isinstance(their, dict):
            assert mine == pytest.approx(their, rel=1e-6)
        else:
            assert torch.equal(mine, their)


def differences(theirs: Record, ours: Record) -> set[str]:
    """Names of the fields that differ."""
    same = {
        "weights": all(torch.equal(value, ours.weights[name]) for name, value in theirs.weights.items()),
        "events": ours.events == theirs.events,
        "rows": same_rows(ours.rows, theirs.rows),
        "rates": ours.rates == theirs.rates,
        "step": ours.step == theirs.step,
        "epoch": ours.epoch == theirs.epoch,
        "callback_metrics": ours.callback_metrics == pytest.approx(theirs.callback_metrics, rel=1e-5, abs=1e-6),
    }
    return {name for name, equal in same.items() if not equal}


def same_rows(ours: list[Row], theirs: list[Row]) -> bool:
    return [row.epoch for row in ours] == [row.epoch for row in theirs] and all(
        dict(mine.metrics) == pytest.approx(dict(their.metrics), rel=1e-5, abs=1e-6)
        for mine, their in zip(ours, theirs, strict=True)
    )


def flat(results: Iterable) -> list:
    """Results without the outer list of several loaders' predictions."""
    return [item for result in results for item in (result if isinstance(result, list) else [result])]

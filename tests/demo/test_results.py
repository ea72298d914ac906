"""The demo's predictions and summary. `tests/test_packaging.py` runs the demo."""

from __future__ import annotations

import torch
from rich.console import Console

from footplate.demo import results

NAMES = ("boot", "bag", "coat")
SUMMARY = {
    "val_acc": 0.90849, "val_loss": 0.2641, "epochs": 10, "steps": 1880, "seconds": 61.23,
    "samples_per_second": 1959.8, "checkpoint": "runs/demo/checkpoints/best", "model": "runs/demo/model.pt2",
    "mlflow_run_id": "4f3c",
}  # fmt: skip


def test_predictions_of_all_batches_become_one_row_each_in_order():
    batches = [
        {"label": torch.tensor([2, 0]), "prediction": torch.tensor([2, 1]), "probability": torch.tensor([0.5, 0.25])},
        {"label": torch.tensor([1]), "prediction": torch.tensor([1]), "probability": torch.tensor([0.75])},
    ]
    assert results.predictions_table(batches, NAMES).to_pydict() == {
        "row": [0, 1, 2],
        "label": [2, 0, 1],
        "label_name": ["coat", "boot", "bag"],
        "prediction": [2, 1, 1],
        "prediction_name": ["coat", "bag", "bag"],
        "probability": [0.5, 0.25, 0.75],
    }


def printed(summary: dict[str, object]) -> str:
    console = Console(width=100, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(results.summary_table(summary))
    return capture.get()


def test_summary_shows_every_figure_of_the_run():
    text = printed(SUMMARY)
    for part in ("90.85%", "0.2641", "10, 1,880", "61.2 s", "1,960 images/s", "checkpoints/best", "model.pt2", "4f3c"):
        assert part in text


def test_summary_says_when_mlflow_has_no_run_yet():
    assert "not recorded yet" in printed(SUMMARY | {"mlflow_run_id": None})

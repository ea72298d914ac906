"""The demo's report: a picture with curves and a confusion matrix, and a short table for the terminal.

`plot_report` draws three panels side by side: the loss of training and validation, the validation accuracy, and the
confusion matrix. The numbers come from the CSV logger's file (`step,epoch,<metric>…`, with an empty cell if a metric wasn't
logged) and from the predictions. So you can draw the picture again for any finished run.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from footplate.core.optional import require

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes
    from rich.table import Table

INK, FAINT, TRAIN, VAL = "#1f2937", "#e5e7eb", "#94a3b8", "#2563eb"
TITLE: dict[str, Any] = {"color": INK, "loc": "left", "fontweight": "bold", "pad": 10}


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Read the rows of a CSV logger's file, without empty cells."""
    with Path(path).open(newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def curve(rows: Sequence[Mapping[str, float]], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Select the steps at which `metric` was logged, and its values; both are empty if it was never logged."""
    points = [(row["step"], row[metric]) for row in rows if metric in row]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    return steps, values


def confusion_matrix(labels: np.ndarray, predictions: np.ndarray, classes: int) -> np.ndarray:
    """Count how often each label (row) was predicted as each class (column): (classes, classes) integers."""
    pairs = np.asarray(labels) * classes + np.asarray(predictions)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def predictions_table(batches: Sequence[Mapping[str, Any]], names: Sequence[str]) -> pa.Table:
    """Make a table of the results of `FashionNet.predict_step`, with one row for each row of the source.

    Args:
        batches: `label`, `prediction` and `probability` of every batch, tensors (B,), in the order of the source.
        names: the name of every class.

    Returns:
        The columns `row` (the position in the source, from 0), `label`, `label_name`, `prediction`, `prediction_name`
        and `probability` (of the predicted class).
    """
    import pyarrow as pa

    columns = {
        name: np.concatenate([batch[name].cpu().numpy() for batch in batches])
        for name in ("label", "prediction", "probability")
    }
    rows = np.arange(len(columns["label"]), dtype=np.int64)
    label, prediction = columns["label"].astype(np.int32), columns["prediction"].astype(np.int32)
    return pa.table(
        {
            "row": rows,
            "label": label,
            "label_name": np.take(names, label),
            "prediction": prediction,
            "prediction_name": np.take(names, prediction),
            "probability": columns["probability"].astype(np.float32),
        }
    )


def plot_report(
    metrics: str | Path | Sequence[Mapping[str, float]],
    labels: np.ndarray,
    predictions: np.ndarray,
    names: Sequence[str],
    path: str | Path,
) -> Path:
    """Draw the curves of a run and the confusion matrix of its predictions into one PNG.

    Args:
        metrics: a CSV logger's file, or its rows. The picture shows `train_loss`, `val_loss` and `val_acc`.
        labels: the true class of every row, integers (rows,).
        predictions: the predicted class of every row, integers (rows,).
        names: the name of every class.
        path: the PNG to write.

    Returns:
        The path of the PNG.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figures = require("matplotlib.figure", "plot", "Drawing the report")
    rows = read_metrics(metrics) if isinstance(metrics, (str, Path)) else metrics
    matrix = confusion_matrix(labels, predictions, len(names))

    figure = figures.Figure(figsize=(15.5, 5), dpi=120, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    loss, accuracy, confusion = figure.subplots(1, 3, width_ratios=[1, 1, 1.25])
    draw_loss(loss, rows)
    draw_accuracy(accuracy, rows)
    draw_confusion(confusion, matrix, names)
    figure.savefig(path)
    return Path(path)


def draw_loss(axes: Axes, rows: Sequence[Mapping[str, float]]) -> None:
    """Draw the loss of training batches and of validation, by step."""
    for metric, name, colour, marker in (
        ("train_loss", "training batch", TRAIN, ""),
        ("val_loss", "validation", VAL, "o"),
    ):
        steps, values = curve(rows, metric)
        axes.plot(steps, values, color=colour, marker=marker, markersize=4, label=name)
    _style(axes, "Loss")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor=INK)


def draw_accuracy(axes: Axes, rows: Sequence[Mapping[str, float]]) -> None:
    """Draw the validation accuracy by step, with its best value in the title."""
    steps, values = curve(rows, "val_acc")
    axes.plot(steps, values, color=VAL, marker="o", markersize=4)
    _style(axes, "Validation accuracy")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if len(values):
        axes.axhline(values.max(), color=TRAIN, linewidth=1, linestyle=":")
        axes.set_title(f"Validation accuracy, best {values.max():.1%}", **TITLE)


def draw_confusion(axes: Axes, matrix: np.ndarray, names: Sequence[str]) -> None:
    """Draw the counts of a confusion matrix, shaded by the root of their share in the row, so rare confusions show."""
    shade = np.sqrt(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1))
    axes.imshow(shade, cmap="Blues", vmin=0, vmax=1)
    axes.set_title(f"Confusion matrix of {matrix.sum():,} rows", **TITLE)
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("predicted", color=INK)
    axes.set_ylabel("true", color=INK)
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)
    for row, column in np.argwhere(matrix):
        colour = "white" if shade[row, column] > 0.6 else INK
        axes.text(column, row, str(matrix[row, column]), ha="center", va="center", color=colour, fontsize=8)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Draw the content of `summary.json` as a table for the terminal."""
    from rich.table import Table

    lines = {
        "validation accuracy": f"{summary['val_acc']:.2%}",
        "validation loss": f"{summary['val_loss']:.4f}",
        "epochs, steps": f"{summary['epochs']}, {summary['steps']:,}",
        "time": f"{summary['seconds']:.1f} s",
        "speed": f"{summary['samples_per_second']:,.0f} images/s",
        "checkpoint": summary["checkpoint"],
        "model file": summary["model"],
        "MLflow run": summary["mlflow_run_id"] or "not recorded yet",
    }
    table = Table(show_header=False, title="Footplate demo", title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines.items():
        table.add_row(name, str(value))
    return table


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, **TITLE)
    axes.set_xlabel("step", color=INK)
    axes.set_xlim(left=0)
    axes.grid(color=FAINT)
    axes.set_axisbelow(True)
    axes.spines[:].set_color(FAINT)
    axes.tick_params(length=0, labelcolor=INK)

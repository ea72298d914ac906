"""Saved predictions of a run: confusions of classes, errors of numbers, and the best and the worst samples.

Predictions are a Parquet file or folder in the run's directory: `predictions.parquet`, or `predictions/`, which
`trainer.predict(…, output=…)` and `footplate predict --output` write. These columns are used:

| column | meaning |
| --- | --- |
| `label` or `target` | the true class or number |
| `prediction` or `pred` | the predicted class or number |
| `probability`, `confidence` or `score` | how sure the model was of its prediction (may be missing) |
| `loss` | the loss of the sample (may be missing) |
| `label_name`, `prediction_name` | names of the classes (may be missing) |
| `row` | the position of the sample in its table, from 0 (may be missing: then it is the position of the prediction) |
| a column of encoded images | its picture (may be missing: then it is read from the table) |

A class is an integer, a text or a truth value. A floating-point label is a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.types as pt

from footplate.core.errors import DataError
from footplate.data.table import Table
from footplate.reporting.pictures import is_picture

NAMES = ("predictions.parquet", "predictions")
MOST_ROWS = 2_000_000
EXAMPLES = 8
PAIRS = 4
EXAMPLES_OF_PAIR = 6

_COLUMNS = {
    "label": ("label", "target"),
    "prediction": ("prediction", "pred"),
    "probability": ("probability", "confidence", "score"),
    "loss": ("loss",),
    "label_name": ("label_name", "target_name"),
    "prediction_name": ("prediction_name",),
    "row": ("row",),
}


@dataclass(frozen=True)
class Predictions:
    """Predictions, as they were saved.

    Attributes:
        path: the file or folder.
        rows: their number.
        of: the number before the rest was left out; the same as `rows` if nothing was.
        columns: the columns by meaning; see the table above.
        pictures: the column with encoded images; None without one.
    """

    path: Path
    rows: int
    of: int
    columns: Mapping[str, pa.ChunkedArray]
    pictures: str | None


@dataclass(frozen=True)
class Sample:
    """A sample to show.

    Attributes:
        index: its position among the predictions.
        row: its position in its table.
        label: the true class or number, as text.
        prediction: the predicted class or number, as text.
        probability: of the prediction; None if it is unknown.
        loss: its loss, or its absolute error; None if it is unknown.
    """

    index: int
    row: int
    label: str
    prediction: str
    probability: float | None
    loss: float | None


@dataclass(frozen=True)
class Pair:
    """A class that was taken for another one."""

    label: str
    prediction: str
    count: int
    share: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Classes:
    """Predictions of classes.

    Attributes:
        names: (classes,) the classes.
        matrix: (classes, classes) int64, how often each class (row) was predicted as each class (column).
        best: right, and the surest or of the least loss.
        worst: wrong, and the surest or of the greatest loss.
        pairs: the most frequent confusions.
    """

    names: tuple[str, ...]
    matrix: np.ndarray
    best: tuple[Sample, ...]
    worst: tuple[Sample, ...]
    pairs: tuple[Pair, ...]

    @property
    def accuracy(self) -> float:
        """The share of right predictions."""
        return float(self.matrix.trace() / max(1, self.matrix.sum()))


@dataclass(frozen=True)
class Numbers:
    """Predictions of numbers.

    Attributes:
        labels: (n,) float64, the true numbers.
        predictions: (n,) float64.
        mean_error: the mean absolute error.
        root_error: the root of the mean squared error.
        best: samples of the least error.
        worst: samples of the greatest error.
    """

    labels: np.ndarray
    predictions: np.ndarray
    mean_error: float
    root_error: float
    best: tuple[Sample, ...]
    worst: tuple[Sample, ...]


def find_predictions(directory: Path) -> Path | None:
    """Return the predictions in a run's directory; None without any."""
    for name in NAMES:
        path = directory / name
        if path.is_file() or (path.is_dir() and any(path.glob("part-*.parquet"))):
            return path
    return None


def read_predictions(path: Path) -> Predictions:
    """Read predictions.

    Raises:
        DataError: the file can't be read, or has no column of predictions or none of labels.
    """
    try:
        dataset = ds.dataset(path, format="parquet")
        column_of = {
            meaning: next((name for name in names if name in dataset.schema.names), None)
            for meaning, names in _COLUMNS.items()
        }
        missing = [meaning for meaning in ("label", "prediction") if column_of[meaning] is None]
        if missing:
            raise DataError(
                f"{path}: there is no column `{missing[0]}`. There are: {', '.join(dataset.schema.names)}. Return "
                "`label` and `prediction` from predict_step."
            )
        wanted = {meaning: name for meaning, name in column_of.items() if name is not None}
        total = dataset.count_rows()
        rows = dataset.scanner(list(wanted.values())).head(MOST_ROWS)
        pictures = next((name for name in dataset.schema.names if _has_pictures(dataset, name)), None)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: the predictions can't be read: {error}") from error
    columns = {meaning: rows.column(name) for meaning, name in wanted.items()}
    return Predictions(path, rows.num_rows, total, columns, pictures)


def interpret(predictions: Predictions) -> Classes | Numbers | None:
    """Compare predictions with labels; None if they are neither classes nor numbers.

    Raises:
        DataError: rows without a label or a prediction only.
    """
    label, prediction = predictions.columns["label"].type, predictions.columns["prediction"].type
    if pt.is_floating(label) or (pt.is_floating(prediction) and pt.is_integer(label)):
        return _numbers(predictions)
    if all(pt.is_integer(kind) or pt.is_string(kind) or pt.is_boolean(kind) for kind in (label, prediction)):
        return _classes(predictions)
    return None


def pictures_of(samples: Sequence[Sample], predictions: Predictions, table: Table | None) -> dict[int, bytes]:
    """Read the encoded images of samples, by their index: from the predictions, or from the table at the same rows."""
    if not samples:
        return {}
    if predictions.pictures is not None:
        indices = sorted({sample.index for sample in samples})
        rows = ds.dataset(predictions.path, format="parquet").take(indices, columns=[predictions.pictures])
        values = rows.column(0).to_pylist()
        return {index: value for index, value in zip(indices, values, strict=True) if is_picture(value)}
    if table is None:
        return {}
    column = picture_column(table)
    if column is None:
        return {}

    starts = np.cumsum([0, *(group.num_rows for group in table.row_groups)])
    by_group: dict[int, list[Sample]] = {}
    for sample in samples:
        if 0 <= sample.row < starts[-1]:
            by_group.setdefault(int(np.searchsorted(starts, sample.row, "right")) - 1, []).append(sample)
    pictures: dict[int, bytes] = {}
    for group, wanted in by_group.items():
        values = table.read_group(group, [column]).column(0)
        for sample in wanted:
            value = values[sample.row - int(starts[group])].as_py()
            if is_picture(value):
                pictures[sample.index] = value
    return pictures


def picture_column(table: Table) -> str | None:
    """Return the first column of encoded images; None without one."""
    names = [field.name for field in table.schema if pt.is_binary(field.type) or pt.is_large_binary(field.type)]
    for name in names:
        if any(is_picture(value) for value in table.select([name]).head(4).column(0).to_pylist()):
            return name
    return None


def confusion_matrix(labels: np.ndarray, predictions: np.ndarray, classes: int) -> np.ndarray:
    """Count how often each label (row) was predicted as each class (column): (classes, classes) integers."""
    pairs = np.asarray(labels, np.int64) * classes + np.asarray(predictions, np.int64)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def _classes(predictions: Predictions) -> Classes:
    columns = predictions.columns
    valid = np.asarray(columns["label"].is_valid()) & np.asarray(columns["prediction"].is_valid())
    if not valid.any():
        raise DataError(f"{predictions.path}: no row has a label and a prediction.")
    label, prediction = (np.array(columns[name].to_pylist(), dtype=object)[valid] for name in ("label", "prediction"))
    keys = sorted(set(label.tolist()) | set(prediction.tolist()), key=lambda key: (str(type(key)), key))
    code = {key: number for number, key in enumerate(keys)}
    labels = np.array([code[key] for key in label.tolist()])
    predicted = np.array([code[key] for key in prediction.tolist()])
    names = tuple(_class_names(columns, keys))

    words = np.array(names, dtype=object)
    make = _Samples(predictions, np.flatnonzero(valid), words[labels].tolist(), words[predicted].tolist())
    right, surest, by_loss = labels == predicted, make.surest(), make.greatest_loss()
    # By loss if there is one. Otherwise, a wrong prediction is the worse the surer it was.
    ascending, descending = (surest, surest) if by_loss is None else (by_loss[::-1], by_loss)
    best = ascending[right[ascending]][:EXAMPLES]
    worst = descending[~right[descending]][:EXAMPLES]

    matrix = confusion_matrix(labels, predicted, len(keys))
    wrong = matrix - np.diag(matrix.diagonal())
    order = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]
    pairs = []
    for row, column in zip(*np.unravel_index(order, wrong.shape), strict=True):
        if wrong[row, column]:
            of_pair = surest[(labels[surest] == row) & (predicted[surest] == column)]
            samples = make.samples(of_pair[:EXAMPLES_OF_PAIR])
            share = wrong[row, column] / matrix[row].sum()
            pairs.append(Pair(names[row], names[column], int(wrong[row, column]), float(share), samples))
    return Classes(names, matrix, make.samples(best), make.samples(worst), tuple(pairs))


def _numbers(predictions: Predictions) -> Numbers:
    label, prediction = (
        predictions.columns[name].cast(pa.float64()).to_numpy(zero_copy_only=False) for name in ("label", "prediction")
    )
    valid = np.isfinite(label) & np.isfinite(prediction)
    if not valid.any():
        raise DataError(f"{predictions.path}: no row has a finite label and prediction.")
    labels, predicted = label[valid], prediction[valid]
    errors = np.abs(predicted - labels)
    text = [[f"{value:.5g}" for value in values] for values in (labels, predicted)]
    make = _Samples(predictions, np.flatnonzero(valid), *text, errors=errors)
    order = np.argsort(errors, kind="stable")
    return Numbers(
        labels, predicted, float(errors.mean()), float(np.sqrt(np.mean(errors**2))),
        make.samples(order[:EXAMPLES]), make.samples(order[::-1][:EXAMPLES]),
    )  # fmt: skip


class _Samples:
    """Makes samples of the rows that have a label and a prediction."""

    def __init__(
        self,
        predictions: Predictions,
        positions: np.ndarray,
        labels: Sequence[str],
        predicted: Sequence[str],
        errors: np.ndarray | None = None,
    ) -> None:
        self._positions, self._labels, self._predicted = positions, labels, predicted
        self._probabilities = _floats(predictions.columns.get("probability"), positions)
        self._losses = _floats(predictions.columns.get("loss"), positions) if errors is None else errors
        rows = predictions.columns.get("row")
        usable = rows is not None and pt.is_integer(rows.type) and not rows.null_count
        self._rows = rows.to_numpy()[positions] if rows is not None and usable else positions

    def surest(self) -> np.ndarray:
        """All positions, the most probable prediction first."""
        if self._probabilities is None:
            return np.arange(len(self._positions))
        return np.argsort(-np.nan_to_num(self._probabilities, nan=-1.0), kind="stable")

    def greatest_loss(self) -> np.ndarray | None:
        """All positions, the greatest loss first; None without losses."""
        if self._losses is None:
            return None
        return np.argsort(-np.nan_to_num(self._losses, nan=np.inf), kind="stable")

    def samples(self, positions: np.ndarray) -> tuple[Sample, ...]:
        """Make the samples at some positions."""
        chosen: list[int] = positions.tolist()
        return tuple(
            Sample(
                int(self._positions[at]), int(self._rows[at]), self._labels[at], self._predicted[at],
                None if self._probabilities is None else float(self._probabilities[at]),
                None if self._losses is None else float(self._losses[at]),
            )
            for at in chosen
        )  # fmt: skip


def _floats(column: pa.ChunkedArray | None, positions: np.ndarray) -> np.ndarray | None:
    if column is None or not (pt.is_floating(column.type) or pt.is_integer(column.type)):
        return None
    return column.cast(pa.float64()).to_numpy(zero_copy_only=False)[positions]


def _class_names(columns: Mapping[str, pa.ChunkedArray], keys: Sequence[Any]) -> list[str]:
    """Return the name of each class: from the columns of names, or its value."""
    names: dict[Any, str] = {}
    for meaning in ("label", "prediction"):
        column = columns.get(f"{meaning}_name")
        if column is None:
            continue
        pairs = pa.table({"key": columns[meaning], "name": column}).group_by("key").aggregate([("name", "min")])
        names |= {
            key: str(name)
            for key, name in zip(pairs["key"].to_pylist(), pairs["name_min"].to_pylist(), strict=True)
            if name is not None
        }
    return [names.get(key, str(key)) for key in keys]


def _has_pictures(dataset: ds.Dataset, name: str) -> bool:
    kind = dataset.schema.field(name).type
    if not (pt.is_binary(kind) or pt.is_large_binary(kind)):
        return False
    return any(is_picture(value) for value in dataset.scanner([name]).head(4).column(0).to_pylist())

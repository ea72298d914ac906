"""Sections about data: statistics of the tables, and the best, worst and most confused predictions with their pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from footplate.reporting.charts import column_chart, confusion_chart, scatter_chart
from footplate.reporting.formats import NOTHING, number, share
from footplate.reporting.html import Html, facts, folded, paragraph, section, table, tag
from footplate.reporting.pictures import data_uri
from footplate.reporting.predictions import Classes, Numbers, Predictions, Sample
from footplate.reporting.table_statistics import Column, TableStatistics

MOST_CHARTS = 12
MOST_VALUES = 3
_LONGEST = 60


def data_section(tables: Sequence[TableStatistics | tuple[str, str]]) -> Html:
    """Draw the statistics of tables. A table that can't be read is its use and a sentence."""
    if not tables:
        absent = "The tables of this run aren't known: no checkpoint and no hyper-parameter names them."
        return section("data", "Data", paragraph(absent, note=True))
    parts: list[Html] = []
    for entry in tables:
        parts += _of_table(entry) if isinstance(entry, TableStatistics) else _of_lost(*entry)
    return section("data", "Data", *parts)


def predictions_section(
    predictions: Predictions | None,
    result: Classes | Numbers | None,
    pictures: Mapping[int, bytes],
    fault: str = "",
) -> Html:
    """Draw what was predicted.

    Args:
        predictions: the saved predictions; None if the run has none.
        result: their comparison with the labels; None if they are neither classes nor numbers.
        pictures: encoded images by the index of the sample.
        fault: why the predictions can't be read; empty if they can.
    """
    title = "Predictions"
    if fault:
        return section("predictions", title, paragraph(fault, note=True))
    if predictions is None:
        absent = (
            "The run has saved no predictions. Save them beside the run, with the columns `label` and `prediction`: "
            "trainer.predict(model, data, output=RUN/predictions)."
        )
        return section("predictions", title, paragraph(absent, note=True))
    left_out = predictions.of - predictions.rows
    note = paragraph(f"The last {left_out:,} of {predictions.of:,} rows are left out.", note=True) if left_out else ""
    if result is None:
        absent = "The predictions are neither classes nor numbers, so they can't be compared with the labels."
        return section("predictions", title, paragraph(absent, note=True))
    if isinstance(result, Numbers):
        return section("predictions", title, *_of_numbers(predictions, result, pictures), note)
    return section("predictions", title, *_of_classes(predictions, result, pictures), note)


def _of_table(statistics: TableStatistics) -> list[Html]:
    sampled = statistics.read < statistics.num_rows
    shown = facts(
        [
            ("table", statistics.uri),
            ("kind", statistics.kind),
            ("version", str(statistics.version)),
            ("rows", f"{statistics.num_rows:,}"),
            ("files", f"{statistics.num_files:,}"),
        ]
    )
    headings = ("column", "type", "nulls", "least", "greatest", "mean", "different", "values")
    grid = table(headings, [_row(column) for column in statistics.columns])
    remark = f"The statistics are of a sample of {statistics.read:,} rows of {statistics.num_rows:,}."
    more = f"{statistics.more:,} more columns are left out." if statistics.more else ""
    charts = [chart for column in statistics.columns if (chart := column_chart(statistics.use, column)) is not None]
    drawn = tag("div", *(chart.draw() for chart in charts[:MOST_CHARTS]), class_="charts") if charts else ""
    return [
        tag("h3", f"{statistics.use}: {statistics.uri}"), shown, paragraph(remark, note=True) if sampled else Html(""),
        grid, paragraph(more, note=True) if more else Html(""),
        folded("Distributions of the columns", drawn) if drawn else Html(""),
    ]  # fmt: skip


def _of_lost(use: str, reason: str) -> list[Html]:
    return [tag("h3", use), paragraph(f"This table can't be read now: {reason}", note=True)]


def _row(column: Column) -> tuple[Any, ...]:
    classes = ", ".join(f"{_short(value)} ({rows:,})" for value, rows in column.classes[:MOST_VALUES])
    if len(column.classes) > MOST_VALUES:
        classes += ", …"
    wrong = f"{column.not_finite:,} NaN or infinite" if column.not_finite else ""
    words = "; ".join(part for part in (classes, wrong, column.note) if part)
    uri = data_uri(column.picture) if column.picture else None
    picture = tag("img", src=uri, alt="the first image of the column", class_="tiny") if uri else ""
    return (
        column.name, column.kind, NOTHING if column.nulls is None else f"{column.nulls:,}", _short(column.least),
        _short(column.greatest), number(column.mean, 4),
        NOTHING if column.distinct is None else f"{column.distinct:,}", tag("span", words, " ", picture, class_="words"),
    )  # fmt: skip


def _of_classes(predictions: Predictions, result: Classes, pictures: Mapping[int, bytes]) -> list[Html]:
    total, right = int(result.matrix.sum()), int(result.matrix.trace())
    summary = f"{right:,} of {total:,} predictions are right ({result.accuracy:.2%})."
    sure = "probability" in predictions.columns
    by_loss = "loss" in predictions.columns
    order = "by loss" if by_loss else "the surest first" if sure else "the first ones"
    parts = [
        paragraph(summary), tag("div", confusion_chart(result.names, result.matrix).draw(), class_="charts"),
        folded("Accuracy of each class", table(("class", "rows", "recall", "precision", "F1"), _class_rows(result))),
        tag("h3", f"Wrong predictions, {order}"), _gallery(result.worst, pictures, "No prediction is wrong."),
    ]  # fmt: skip
    if result.pairs:
        parts.append(tag("h3", "Most frequent confusions"))
    for pair in result.pairs:
        times = f"{pair.count:,} of the class ({pair.share:.1%})"
        parts += [
            tag("h4", f"{pair.label} → {pair.prediction}: {times}"),
            _gallery(pair.samples, pictures, ""),
        ]
    parts += [tag("h3", f"Right predictions, {order}"), _gallery(result.best, pictures, "No prediction is right.")]
    return parts


def _of_numbers(predictions: Predictions, result: Numbers, pictures: Mapping[int, bytes]) -> list[Html]:
    return [
        facts(
            [
                ("samples", f"{len(result.labels):,}"),
                ("mean absolute error", number(result.mean_error)),
                ("root mean squared error", number(result.root_error)),
            ]
        ),
        tag("div", scatter_chart(result.labels, result.predictions).draw(), class_="charts"),
        tag("h3", "Greatest errors"), _gallery(result.worst, pictures, ""),
        tag("h3", "Least errors"), _gallery(result.best, pictures, ""),
    ]  # fmt: skip


def _class_rows(result: Classes) -> list[tuple[Any, ...]]:
    rows, columns = result.matrix.sum(1), result.matrix.sum(0)
    right = result.matrix.diagonal()
    rows_of, columns_of, right_of = rows.tolist(), columns.tolist(), right.tolist()

    def of(part: int, whole: int) -> float | None:
        return part / whole if whole else None

    order = np.argsort(right / np.maximum(rows, 1), kind="stable")
    return [
        (
            result.names[index],
            f"{rows_of[index]:,}",
            share(of(right_of[index], rows_of[index])),
            share(of(right_of[index], columns_of[index])),
            share(of(2 * right_of[index], rows_of[index] + columns_of[index])),
        )
        for index in order.tolist()
    ]


def _gallery(samples: Sequence[Sample], pictures: Mapping[int, bytes], absent: str) -> Html:
    if not samples:
        return paragraph(absent, note=True) if absent else Html("")
    return tag("ul", *(_card(sample, pictures.get(sample.index)) for sample in samples), class_="gallery")


def _card(sample: Sample, picture: bytes | None) -> Html:
    uri = data_uri(picture) if picture else None
    right = sample.label == sample.prediction
    if uri:
        image = tag("img", src=uri, alt=f"row {sample.row}, which is {sample.label}", loading="lazy")
    else:
        image = tag("span", "too large to show" if picture else "no picture", class_="no-picture")
    sure = "" if sample.probability is None else f" {sample.probability:.1%}"
    lines = [
        tag("span", f"{sample.prediction}{sure}", class_="right" if right else "wrong"),
        tag("span", f"is {sample.label}") if not right else "",
        tag(
            "span", f"row {sample.row:,}" + ("" if sample.loss is None else f", loss {sample.loss:.3g}"), class_="note"
        ),
    ]
    return tag("li", image, *lines)


def _short(value: Any) -> str:
    text = NOTHING if value is None else number(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

"""The results of the demo: its predictions as a table, and a short summary for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table


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

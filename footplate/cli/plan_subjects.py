"""What `footplate plan` plans for when it isn't a library's model: the demo, or a run's configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from footplate.cli.class_types import SHORT_NAMES
from footplate.cli.fit import parser
from footplate.cli.parsing import instantiate, parse
from footplate.planning.subject import Subject, batch_size_of, example_of, precision_of


def demo(batch_size: int | None, rows: int | None, epochs: int | None, precision: str) -> Subject:
    """The demo's training."""
    from footplate.data.table import Table
    from footplate.demo import TABLES
    from footplate.demo.model import FashionNet

    with torch.device("meta"):
        module = FashionNet()
        batch = {"image": torch.empty(64, 1, 28, 28, dtype=torch.uint8), "label": torch.empty(64, dtype=torch.int64)}
    return Subject(
        name="the demo's FashionNet",
        module=module,
        batch=batch,
        batch_size=batch_size or 64,
        precision=precision,
        rows=rows or Table(TABLES / "train").num_rows,
        epochs=epochs or 10,
    )


def configured(
    path: Path, batch_size: int | None, rows: int | None, epochs: int | None, precision: str | None
) -> Subject:
    """The training of a `footplate fit` configuration file: its model, the first batch of its data, its trainer's settings.

    Raises:
        FootplateError: a mistake in the file.
        Exception: what the model's or data's code raised.
    """
    made = parser("fit")
    objects = instantiate(made, parse(made, ["--config", str(path)], SHORT_NAMES))
    trainer = objects.trainer
    data = objects.data if objects.data is not None else objects.model
    batch = example_of(data)
    size = batch_size or batch_size_of(batch)
    assumed = []
    if rows is None:
        rows = _rows_of(data, batch_size_of(batch))
    if trainer.accumulate_grad_batches not in (None, 1):
        assumed.append("a step for each batch: accumulate_grad_batches isn't part of the plan.")
    return Subject(
        name=type(objects.model).__name__,
        module=objects.model,
        batch=batch,
        batch_size=size,
        precision=precision_of(precision or str(trainer.precision or "32")),
        rows=rows,
        epochs=epochs or max(1, trainer.max_epochs or 1),  # -1: without end
        gradient_clip_val=trainer.gradient_clip_val,
        assumed=tuple(assumed),
    )


def _rows_of(data: Any, batch_size: int) -> int | None:
    """Samples of an epoch, where the loader knows how many batches it has."""
    try:
        return len(data.train_dataloader()) * batch_size
    except TypeError:
        return None

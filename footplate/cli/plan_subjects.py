"""Subjects of `footplate plan` that aren't library models: the demo, and the configuration file of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from footplate.cli.fit import parser
from footplate.cli.fit_arguments import instantiate, parse
from footplate.planning.layouts import Strategy
from footplate.planning.subject import Subject, batch_size_of, example_of, precision_of


def demo(batch_size: int | None, rows: int | None, epochs: int | None, precision: str) -> Subject:
    """Describe the training of the demo."""
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
    """Describe the training of a configuration file of `footplate fit`.

    The file gives the model, the first batch of its data, and the settings of its trainer. Arguments that aren't None win
    over the file.

    Raises:
        FootplateError: a mistake in the file.
        Exception: the code of the model or data raised it.
    """
    fit_parser = parser("fit")
    objects = instantiate(fit_parser, parse(fit_parser, ["--config", str(path)]))
    trainer = objects.trainer
    data = objects.data if objects.data is not None else objects.model
    batch = example_of(data)

    if rows is None:
        rows = _rows_of(data, batch_size_of(batch))
    assumed = []
    if trainer.accumulate_grad_batches not in (None, 1):
        assumed.append("one batch per step: the plan ignores accumulate_grad_batches.")
    return Subject(
        name=type(objects.model).__name__,
        module=objects.model,
        batch=batch,
        batch_size=batch_size or batch_size_of(batch),
        precision=precision_of(precision or str(trainer.precision or "32")),
        rows=rows,
        # max_epochs=-1 is a training without end. The plan is for one epoch then.
        epochs=epochs or max(1, trainer.max_epochs or 1),
        gradient_clip_val=trainer.gradient_clip_val,
        assumed=tuple(assumed),
        strategy=_strategy_of(trainer.strategy),
        # A CUDA graph replays the kernels of an eager step.
        compile=bool(trainer.compile) and trainer.compile != "cudagraphs",
    )


def _strategy_of(strategy: Any) -> Strategy:
    """Return the strategy of a run as a plan knows it. Several processes of "auto" and of "replicas" are data-parallel."""
    known = not isinstance(strategy, str) or strategy in ("fsdp", "model_parallel")
    return strategy if known else "ddp"


def _rows_of(data: Any, batch_size: int) -> int | None:
    """Count the samples of an epoch; None if the loader doesn't know how many batches it has."""
    try:
        return len(data.train_dataloader()) * batch_size
    except TypeError:
        return None

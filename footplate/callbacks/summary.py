"""Print the model's layers and their numbers of parameters before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from footplate.callbacks.base import Callback

if TYPE_CHECKING:
    from torch import nn
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView


class ModelSummary(Callback):
    """Print a table of the layers.

    Args:
        max_depth: depth of nested layers to print; -1 for all, 0 for the totals only.

    Examples:
        >>> trainer = fp.Trainer(callbacks=[fp.ModelSummary(max_depth=-1)])
    """

    sees_weights = False

    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = max_depth

    def on_fit_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.world.rank != 0:
            return
        from rich.table import Table

        rows = layers(pl_module, self.max_depth)
        if rows:
            table = Table(box=None, pad_edge=False)
            for title, justify in (("layer", "left"), ("type", "left"), ("parameters", "right")):
                table.add_column(title, justify=justify, style="dim" if title == "type" else None)  # type: ignore[arg-type]
            for name, kind, count in rows:
                table.add_row(name, kind, f"{count:,}")
            trainer.print(table)
        total, trainable, nbytes = totals(pl_module)
        frozen = f", {total - trainable:,} of them frozen" if trainable != total else ""
        trainer.print(f"{total:,} parameters{frozen}, {nbytes / 1e6:,.1f} MB")


def layers(module: nn.Module, max_depth: int) -> list[tuple[str, str, int]]:
    """List name, type and number of parameters of each layer down to a depth."""
    return [
        (name, type(layer).__name__, sum(p.numel() for p in layer.parameters() if not _is_lazy(p)))
        for name, layer in module.named_modules()
        if name and (max_depth == -1 or name.count(".") < max_depth)
    ]


def totals(module: nn.Module) -> tuple[int, int, int]:
    """Count all parameters, the trainable ones, and their bytes."""
    parameters = [p for p in module.parameters() if not _is_lazy(p)]
    return (
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(p.numel() * p.element_size() for p in parameters),
    )


def _is_lazy(parameter: torch.nn.Parameter) -> bool:
    return torch.nn.parameter.is_lazy(parameter)

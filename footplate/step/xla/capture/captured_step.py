"""The result of a capture: a step as a graph, and what its caller must know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from footplate.step.xla.capture.attribute_guards import Reads
from footplate.step.xla.capture.refusals import CaptureError
from footplate.step.xla.capture.state import Path
from footplate.step.xla.capture.symbolic_scalars import Counted
from footplate.step.xla.capture.torch_optimizers import Optimizers
from footplate.step.xla.capture.torch_optimizers import settings as optimizer_settings


@dataclass(frozen=True)
class Captured:
    """A step as a graph without side effects.

    The graph's inputs are the state's tensors in the order of `paths`, then `rates` numbers (float64: those of
    `optimizers.rates_of`, then `counted.values`), then the batch's tensors in the order of their leaves. Its outputs
    are the new state in the same order (nothing, for an evaluation), then the leaves of `output`, then the values of
    `logs` in their order.

    Attributes:
        name: the captured step, such as `"Classifier.training_step"`.
        graph: the operations, of core ATen.
        paths: the names of the state's tensors (see `state.py`).
        rates: the number of values that each step is given again.
        batch: the form of the batch: a tree, and the (shape, type) of each tensor.
        output: the form of what comes back: for training the loss, or a dictionary of it, for an evaluation what the
            step returned.
        logs: for each name given to `self.log`, the other arguments of that call.
        trains: True if the state changes.
        reads: the plain attributes that the step has read, and the optimizers' settings: constants of the graph.
        steps: the optimizer steps, which `global_step` grows by.
        skips: True if `training_step` returned None: the batch leaves no gradients.
        counted: what is made of numbers that change, such as `global_step`: inputs, and decisions that the graph is
            for.
    """

    name: str
    graph: GraphModule
    paths: tuple[Path, ...]
    rates: int
    batch: tuple[Any, tuple[tuple[tuple[int, ...], torch.dtype], ...]]
    output: Any
    logs: dict[str, dict[str, Any]]
    trains: bool
    reads: Reads
    steps: int = 0
    skips: bool = False
    counted: Counted = field(default_factory=Counted)

    def check_attributes(self, module: nn.Module, optimizer: Optimizers = None) -> None:
        """Raise if an attribute that the step read, or a setting of the optimizer, has changed.

        Learning rates may change, and the momentum that OneCycleLR and CyclicLR move.

        Raises:
            CaptureError: with the attribute, both values, and the line that read it.
        """
        changed = [change.text for change in self.reads.changes(module)]
        if optimizer is not None:
            changed += self.reads.changed_settings(optimizer_settings(optimizer))
        if changed:
            raise CaptureError(f"{self.name} must be captured again:\n    " + "\n    ".join(changed))

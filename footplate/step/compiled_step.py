"""The step of `compile="step"` and `compile="cudagraphs"`: compiled functions run in place of the module's Python.

    compile="step"         torch.compile sees `training_step` as one function, with the loss and what it logs, and
                           clipping with the optimizer's step as another. The backward pass is compiled with the first.
    compile="cudagraphs"   the same two functions are traced, and keep the kernels of the eager step.

On a GPU, a whole step becomes one CUDA graph, if only kernels are in it (`step_graph.py`). Then the host launches the
graph, and no longer each kernel. The order of a step stays that of `phases.py`. Hooks run between the phases, in a step
that is no CUDA graph.

Shapes are static. The shapes of the first batch are compiled. A batch of other shapes, such as the last of an epoch, runs
`training_step` as it is, so that nothing is compiled again. If two such batches of the same shapes follow each other, these
shapes are compiled from the second on. Checkpoints keep the shapes: a run that resumes at the last batch of an epoch
compiles what the run before has compiled.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from footplate.core.errors import ConfigError
from footplate.step import step_graph
from footplate.step.base import StepSpec
from footplate.step.compiled_functions import CompiledTrainingStep, CompiledUpdate
from footplate.step.eager import EagerStep

log = logging.getLogger(__name__)

BACKENDS = {"step": "inductor", "cudagraphs": "eager"}

Shapes = list[tuple[torch.Size, torch.dtype]]

MAX_CHANGES = 8


class CompiledStep(EagerStep):
    """The step on one device, or on several by `DistributedDataParallel`, compiled as a whole.

    Attributes:
        name: "step" or "cudagraphs".
    """

    def __init__(self, spec: StepSpec) -> None:
        super().__init__(dataclasses.replace(spec, compile=None))
        _check(spec, self.steps_by_closure)
        assert isinstance(spec.compile, str)
        assert self.optimizer is not None
        self.name = spec.compile
        backend = BACKENDS[spec.compile]

        self._update: CompiledUpdate | None = None
        if CompiledUpdate.suits(self.optimizer):
            clip = None if self._own_clipping else spec.gradient_clip_val
            self._update = self.make_step = CompiledUpdate(
                self.optimizer, clip, spec.gradient_clip_algorithm, spec.device, backend
            )

        self._graphs: step_graph.StepGraphs | None = None
        if spec.device.type == step_graph.DEVICE:
            reason = self._reason_against_graphs()
            if reason is None and self._update is not None:
                self._graphs = step_graph.StepGraphs(self, self._update, backend)
            else:
                log.warning('compile="%s": a step is no CUDA graph, because %s.', spec.compile, reason)
        self.trained = CompiledTrainingStep(
            spec.module, spec.record, backend if self._graphs is None else self._graphs.backend
        )
        self._shapes: Shapes | None = None
        self._shapes_before: Shapes | None = None
        self._changes = 0

    def train_batch(self, batch: Any, batch_idx: int, ends_window: bool) -> Any:
        leaves, structure = pytree.tree_flatten(batch)
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
        if shapes != self._shapes:
            self._consider(shapes)
        self._shapes_before = shapes
        self.trained.eager = shapes != self._shapes
        graphs = self._graphs
        if graphs is None or not graphs.active:
            return super().train_batch(batch, batch_idx, ends_window)
        if self.trained.eager or not self._window.single:
            graphs.gradients_of = None
            return super().train_batch(batch, batch_idx, ends_window)

        batch = graphs.begin(self.spec.precision.convert_batch(leaves), structure)
        # A replay has no phases.
        forward = super().forward if graphs.ready else self.forward
        self.changing = graphs.ready
        with graphs.stream():
            output = forward(batch, batch_idx)
            if graphs.replayed is None:
                self.backpropagate(output, batch_idx)
                self.end_window()
            else:
                self.count_step()
        return graphs.end(output)

    def _consider(self, shapes: Shapes) -> None:
        """Compile other shapes if they are the first, or come twice in a row. A few changes are allowed."""
        if self._shapes is not None:
            if shapes != self._shapes_before or self._changes == MAX_CHANGES:
                return
            self._changes += 1
            if self._graphs is not None:
                self._graphs.forget()
            log.info("From this batch on, steps are compiled for the shapes %s.", [tuple(shape) for shape, _ in shapes])
        self._shapes = shapes

    def after_forward(self, loss: Tensor) -> None:
        """Run the backward pass and the update, for a graph.

        A look at a step replaces methods of this object by some that wait for the GPU, so these are the class's.
        """
        EagerStep.differentiate(self, loss)
        self.make_step()

    def clip(self) -> None:
        # The update clips, unless the module does it itself.
        if self._own_clipping or self._update is None:
            super().clip()

    def release(self) -> None:
        super().release()
        self.trained = self.spec.module
        if self._graphs is not None:
            self._graphs.forget()
            self._graphs = None

    def state_dict(self) -> dict[str, Any]:
        compiled, before = _written(self._shapes), _written(self._shapes_before)
        return super().state_dict() | {"shapes": compiled, "shapes_before": before, "changes": self._changes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        # A checkpoint of a run without this compilation has none.
        self._shapes, self._shapes_before = _read(state.get("shapes")), _read(state.get("shapes_before"))
        self._changes = state.get("changes", 0)

    def _reason_against_graphs(self) -> str | None:
        """Return why a step isn't one CUDA graph: something between its kernels must run each time. None if it is one."""
        spec, optimizer = self.spec, type(self.optimizer).__name__
        hooks = [*self.before_zero_grad, *self.before_backward, *self.after_backward, *self.before_optimizer_step]
        own = [
            name for name, overridden in (
                ("optimizer_zero_grad", self._own_zero_grad), ("backward", self._own_backward),
                ("configure_gradient_clipping", self._own_clipping),
            ) if overridden
        ]  # fmt: skip
        if self._distributed:
            return "gradients are averaged over ranks in it"
        if hooks:
            return f"the hook {hooks[0].__qualname__} runs in it"
        if own:
            return f"{type(spec.module).__name__}.{own[0]} runs in it"
        if self._update is None:
            return f"the step of {optimizer} is not torch's own, or has hooks"
        if spec.accumulate_grad_batches != 1:
            return "gradients are accumulated over batches"
        if torch.is_anomaly_enabled():
            return "detect_anomaly watches its operations"
        return None


def _written(shapes: Shapes | None) -> list[tuple[list[int], str]] | None:
    """Shapes as a checkpoint keeps them."""
    return None if shapes is None else [(list(shape), str(dtype)) for shape, dtype in shapes]


def _read(written: Any) -> Shapes | None:
    if written is None:
        return None
    return [(torch.Size(shape), getattr(torch, dtype.removeprefix("torch."))) for shape, dtype in written]


def _check(spec: StepSpec, by_closure: bool) -> None:
    """Refuse what can't be compiled as a whole step."""
    argument, instead = f'compile="{spec.compile}"', "Use compile=True, which compiles the layers"
    refused: Sequence[tuple[bool, str]] = (
        (spec.compile == "cudagraphs" and spec.device.type != "cuda", f"needs a GPU of CUDA, not {spec.device.type}"),
        (spec.compile == "cudagraphs" and spec.strategy.is_distributed, "needs a single process"),
        (spec.strategy.sharded or spec.strategy.copies, f'doesn\'t go with strategy="{spec.strategy.name}"'),
        (not spec.module.automatic_optimization, "needs automatic optimisation"),
        (by_closure, "doesn't go with an optimizer that evaluates the loss itself, nor with an own optimizer_step"),
        (not spec.optimizers, "needs an optimizer"),
        (spec.precision.name == "16-mixed", 'doesn\'t go with precision="16-mixed", which scales the loss'),
    )
    for is_refused, why in refused:
        if is_refused:
            raise ConfigError(f"{argument} {why}. {instead}, or leave it out.")

"""Capture of one step as a graph, from the first line of `training_step` to the last parameter that changes.

`step/phases.py` has the order of the step. All of it runs with tensors that have no memory, installed instead of the
module's and optimizer's own (`state.py`), which come back untouched. Learning rates are inputs, so a scheduler never
needs a new program. Random operations (dropout, `torch.rand`) stay operations of the graph. The caller derives their
numbers from a key, which is an input too, so no draw is ever a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides
from footplate.step.precision import Precision
from footplate.step.xla.capture import torch_tracing
from footplate.step.xla.capture.arithmetic import NumbersAsInputs, Present, pythons_functions
from footplate.step.xla.capture.attention_op import attention_as_one
from footplate.step.xla.capture.attribute_guards import Attribute, form_of
from footplate.step.xla.capture.attribute_guards import fed as feeding
from footplate.step.xla.capture.captured_step import Captured
from footplate.step.xla.capture.module_view import Logs, call_step, viewed_module
from footplate.step.xla.capture.refusals import CaptureError, explained
from footplate.step.xla.capture.replaced_functions import ReplacedFunctions
from footplate.step.xla.capture.rng_ops import NoGenerators
from footplate.step.xla.capture.side_effects import Change, Changes, refuse_changes
from footplate.step.xla.capture.state import Installed, Path, State, state_of
from footplate.step.xla.capture.symbolic_scalars import MOST, Counters
from footplate.step.xla.capture.torch_optimizers import Optimizers, as_list, rates_of
from footplate.step.xla.capture.torch_optimizers import settings as optimizer_settings
from footplate.step.xla.capture.torch_tracing import pytree
from footplate.step.xla.capture.traced_step import Settings, TracedStep


def capture_training(
    module: Any,
    optimizer: Optimizers,
    batch: Any,
    *,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str = "norm",
    averages: bool = False,
    precision: str = "32-true",
    accumulate_grad_batches: int = 1,
    ends_window: bool = True,
    parts: int = 1,
    fed: tuple[Attribute, ...] = (),
    present: Present | None = None,
) -> Captured:
    """Capture `training_step`, the backward pass, clipping and `optimizer.step()`.

    A window of N accumulated batches needs two programs: one with `ends_window=False`, for every batch but the last,
    and one with True. Both have the window's gradients in their state (`state_of(module, optimizer, gradients=True)`).

    Args:
        module: a `footplate.Module` or `LightningModule`, on any device, the meta device too: only shapes are used.
        optimizer: one of torch's (`optimizers.CAPTURED`) of its parameters, with any number of groups; a list of them
            for manual optimisation.
        batch: an example; a tree of tensors. The graph holds for batches of the same shapes and types.
        gradient_clip_val: as the `Trainer`'s; None or 0 for none.
        gradient_clip_algorithm: "norm" or "value".
        averages: average gradients, floating-point buffers, logs and loss over all devices that will run the step,
            after the backward pass.
        precision: as the `Trainer`'s: "bf16-mixed" computes the forward pass under autocast; for "bf16-true" and
            "64-true" the module has that type already (`Precision.convert_module`), and batches are converted in the
            program.
        accumulate_grad_batches: how many batches' gradients make a step; the loss is divided by it, what comes back
            isn't.
        ends_window: whether the optimizer steps after this batch.
        parts: into how many parts the rows of a batch are cut, of which `batch` is one.
        fed: numbers among the attributes of the module and its submodules that are to be inputs and no constants.
        present: what counters are; by default the module's, and 0 for `batch_idx`. The graph holds as long as
            `Captured.counted` finds no decision broken.

    Raises:
        CaptureError: what the step does can't be captured; the text names the user's line.
        ConfigError: the batch has no tensors, `training_step` returned no loss, or settings that don't go together.
    """
    step_name = f"{type(module).__name__}.training_step"
    optimizers = as_list(optimizer)
    settings = Settings(
        gradient_clip_val,
        gradient_clip_algorithm,
        averages,
        Precision.parse(precision),
        accumulate_grad_batches,
        ends_window,
        parts,
    )
    _refuse_unfit(module, len(optimizers), settings)

    def run(state: State, rates: list[Tensor], traced_batch: Any, logs: Logs) -> tuple[list[Tensor], Any]:
        installed = Installed(module, optimizer, state, rates)
        traced = TracedStep(step_name, module, optimizers, settings, logs)
        with installed.inside(), feeding(module, logs.counters.attributes(fed)), torch_tracing.as_compiled():
            result = traced.run(installed, traced_batch)
            return installed.read(ends_window and result is not None), result

    accumulates, present = accumulate_grad_batches != 1, present or Present(module)
    kind = settings.precision
    return _settled(step_name, lambda: _capture(step_name, module, optimizer, accumulates, batch, present, kind, run))


def capture_evaluation(
    module: Any,
    batch: Any,
    stage: str = "validation",
    *,
    precision: str = "32-true",
    dataloader_idx: int | None = None,
    fed: tuple[Attribute, ...] = (),
    present: Present | None = None,
) -> Captured:
    """Capture `validation_step`, `test_step` or `predict_step`, with the module in evaluation mode.

    Args:
        module: as for `capture_training`; its mode is restored.
        batch: an example; a tree of tensors.
        stage: "validation", "test" or "predict".
        precision: as for `capture_training`.
        dataloader_idx: which of several loaders the batch is of, a constant of the graph; None where there is one.
        fed: as for `capture_training`.
        present: as for `capture_training`.

    Raises:
        CaptureError: what the step does can't be captured, or it changes a buffer; the text names the user's line.
    """
    name = f"{stage}_step"
    step_name = f"{type(module).__name__}.{name}"

    kind, present = Precision.parse(precision), present or Present(module)

    def run(state: State, rates: list[Tensor], traced_batch: Any, logs: Logs) -> tuple[list[Tensor], Any]:
        installed = Installed(module, None, state, rates)
        forward, numbers = kind.forward_context(torch.device("cpu")), logs.counters.attributes(fed)
        with (
            installed.inside(), feeding(module, numbers), torch_tracing.as_compiled(), viewed_module(module, logs, {}),
            torch.no_grad(), forward,
        ):  # fmt: skip
            output = call_step(
                getattr(module, name), name, kind.convert_batch(traced_batch), logs.counters, dataloader_idx
            )
            detached = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
            return installed.read(), detached

    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        return _settled(step_name, lambda: _capture(step_name, module, None, False, batch, present, kind, run))
    finally:
        for part, training in modes:
            part.training = training


def _floating(precision: Precision) -> torch.dtype:
    """The type of Python's floats among tensors."""
    return torch.float64 if precision.name == "64-true" else torch.get_default_dtype()


def _settled(step_name: str, capture: Callable[[], tuple[Captured, list[Change]]]) -> Captured:
    """Capture once, and once more if attributes changed, to find out if they change every time."""
    captured, changes = capture()
    refuse_changes(step_name, [change for change in changes if change.traced])
    if changes:
        captured, changes = capture()
        refuse_changes(step_name, changes)
    return captured


def _capture(
    step_name: str,
    module: nn.Module,
    optimizer: Optimizers,
    gradients: bool,
    batch: Any,
    present: Present,
    precision: Precision,
    run: Callable[[State, list[Tensor], Any, Logs], tuple[list[Tensor], Any]],
) -> tuple[Captured, list[Change]]:
    """Trace `run` over the state, the rates and the batch: a step that trains if there is an optimizer."""
    known = len(rates_of(optimizer))
    # The trace finds the counters that are inputs: there are `MOST` of them at the most.
    rates = [torch.zeros((), dtype=torch.float64) for _ in range(known + MOST)]
    trains = optimizer is not None
    leaves, tree = _leaves_of(batch)
    mode = torch_tracing.fake_mode()
    with mode:
        state = state_of(module, optimizer, gradients)
    inputs = [torch_tracing.fake_like(tensor, mode) for tensor in (*state.values(), *rates, *leaves)]
    learning = _learning(module, state) + [False] * (len(rates) + len(leaves))
    counters = Counters(present, _floating(precision))
    logs, changes = Logs(counters, module), Changes(module)
    logs.reads.settings = optimizer_settings(optimizer)
    logs.reads.form = form_of(module)
    output_tree: list[Any] = []

    def whole(traced: list[Tensor]) -> list[Tensor]:
        now = dict(zip(state, traced, strict=False))
        traced_batch = pytree.tree_unflatten(traced[len(state) + len(rates) :], tree)
        numbers = traced[len(state) : len(state) + len(rates)]
        counters.inputs = numbers[known:]
        after, output = run(now, numbers[:known], traced_batch, logs)
        counters.inputs = ()
        returned, returned_tree = pytree.tree_flatten(output)
        output_tree[:] = [returned_tree]
        return [*after, *_tensors(step_name, returned), *logs.values.values()]

    with (
        explained(step_name), changes.watched(), pythons_functions(), NumbersAsInputs(), attention_as_one(),
        ReplacedFunctions(), NoGenerators(),
    ):  # fmt: skip
        graph = torch_tracing.trace(whole, inputs, learning)
    counted = counters.counted
    unused = range(len(state) + known + len(counted.numbers), len(state) + len(rates))
    torch_tracing.drop_inputs(graph, unused)
    if not trains:
        graph = _without_state(step_name, graph, tuple(state))
    form = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
    skips = trains and graph_outputs(graph)[len(state)] is None
    captured = Captured(
        step_name, graph, tuple(state), known + len(counted.numbers), (tree, form), output_tree[0], logs.options, trains,
        logs.reads, counters.steps, skips, counted,
    )  # fmt: skip
    return captured, changes.changed


def graph_outputs(graph: GraphModule) -> Any:
    """The nodes that a graph returns, and None for each None."""
    return list(graph.graph.nodes)[-1].args[0]


def _learning(module: nn.Module, state: State) -> list[bool]:
    learn: dict[Path, bool] = {
        ("params", name): parameter.requires_grad for name, parameter in module.named_parameters()
    }
    return [learn.get(path, False) for path in state]


def _leaves_of(batch: Any) -> tuple[list[Tensor], Any]:
    leaves, tree = pytree.tree_flatten_with_path(batch)
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise CaptureError(
                f"batch{pytree.keystr(path)} is {leaf!r:.60}, a {type(leaf).__name__}: a captured step takes tensors "
                "alone, anything else would be a constant of the program. Leave it out, or make it a tensor."
            )
    if not leaves:
        raise ConfigError("batch: there is no tensor in it.")
    return [leaf for _, leaf in leaves], tree


def _tensors(step_name: str, leaves: list[Any]) -> list[Any]:
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, type(None))):
            raise CaptureError(
                f"{step_name} returned {leaf!r:.60}, a {type(leaf).__name__}: a captured step returns tensors or None."
            )
    return leaves


def _without_state(step_name: str, graph: GraphModule, paths: tuple[Path, ...]) -> GraphModule:
    """An evaluation's graph without the state among its outputs, after a check that the state is unchanged."""
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    (outputs,) = nodes[-1].args
    for path, before, after in zip(paths, inputs, outputs, strict=False):
        while after is not before and after.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            after = after.args[0]
        if after is not before:
            raise CaptureError(
                f"{step_name} changes {'.'.join(path)}; an evaluation that is captured leaves the state alone."
            )
    nodes[-1].args = (list(outputs[len(paths) :]),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _refuse_unfit(module: Any, optimizers: int, settings: Settings) -> None:
    """Refuse overrides of phases that can't be captured, and settings that don't go together."""
    module_name, automatic = type(module).__name__, getattr(module, "automatic_optimization", True)
    accumulates = settings.accumulate_grad_batches != 1
    if overrides(module, "optimizer_step"):
        raise CaptureError(f"{module_name} overrides optimizer_step, which can't be captured yet: it takes a closure.")
    if settings.precision.name.startswith("16"):
        raise CaptureError(f'precision="{settings.precision.name}" can\'t be captured: use "bf16-mixed".')
    if automatic and optimizers != 1:
        raise ConfigError(f"{module_name} has {optimizers} optimizers: without manual optimisation a step has one.")
    if not automatic and (settings.gradient_clip_val or accumulates or not settings.ends_window):
        raise ConfigError(f"{module_name}: with manual optimisation, training_step itself clips and accumulates.")
    for name in ("on_before_zero_grad", "optimizer_zero_grad"):
        if accumulates and overrides(module, name):
            raise CaptureError(
                f"{module_name} overrides {name}, which can't be captured together with accumulated batches."
            )
    if not settings.ends_window and not accumulates:
        raise ConfigError("ends_window=False: with accumulate_grad_batches=1 every batch ends its window.")

"""The capture of one step, from the first line of `training_step` to the last parameter that changes.

In this order, as the eager step does it, each hook only where it is overridden:

    training_step → on_before_zero_grad → on_before_backward → backward → on_after_backward
    → on_before_optimizer_step → clip → optimizer.step

All of it runs with tensors that have no memory, in the place of the module's and optimizer's own (`state.py`), which
come back untouched. Learning rates are inputs, so a scheduler never makes a new program necessary. Random operations
(dropout, `torch.rand`) stay operations of the graph; whoever runs it derives their numbers from a key, which is an input
too: no draw is ever frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from footplate.errors import ConfigError
from footplate.hooks import overrides, step_arguments
from footplate.step.capture import functional
from footplate.step.capture.averaging import average_step
from footplate.step.capture.counters import Counter, CounterWatch, CountingTrainer
from footplate.step.capture.frozen import Change, Changes, Reads, refuse_changes
from footplate.step.capture.functional import pytree
from footplate.step.capture.refusals import CaptureError, calling_place, explained
from footplate.step.capture.state import Installed, Path, State, state_of


@dataclass(frozen=True)
class Captured:
    """A step as a graph without side effects.

    The graph's inputs are the state's tensors in the order of `paths`, then `rates` learning rates (float64, one for
    each group of the optimizer), then the batch's tensors in the order of their leaves. Its outputs are the new state in
    the same order (nothing, for an evaluation), then the leaves of `output`, then the values of `logs` in their order.

    Attributes:
        name: what was captured, such as `"Classifier.training_step"`.
        graph: the operations, of core ATen.
        paths: the names of the state's tensors (see `state.py`).
        rates: how many learning rates there are; 0 for an evaluation.
        batch: the form of the batch: a tree, and the (shape, type) of each of its tensors.
        output: the form of what comes back: for training the loss, for an evaluation what the step returned.
        logs: for each name given to `self.log`, the other arguments of that call.
        trains: whether the state changes.
        reads: the plain attributes that the step has read; they are constants of the graph.
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

    def check_attributes(self, module: nn.Module) -> None:
        """Raise when an attribute that the step read is no longer what it was.

        Raises:
            CaptureError: with the attribute, both values, and the line that read it.
        """
        changed = self.reads.changed(module)
        if changed:
            raise CaptureError(f"{self.name} must be captured again:\n    " + "\n    ".join(changed))


def capture_training(
    module: Any,
    optimizer: Optimizer,
    batch: Any,
    *,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str = "norm",
    averages: bool = False,
) -> Captured:
    """Capture `training_step`, the backward pass, clipping and `optimizer.step()`.

    Args:
        module: a `footplate.Module` or `LightningModule`, on any device, the meta device too: only shapes are used.
        optimizer: an SGD, Adam or AdamW of its parameters, with any number of groups.
        batch: an example; a tree of tensors. The graph holds for batches of the same shapes and types.
        gradient_clip_val: as the `Trainer`'s; None or 0 for none.
        gradient_clip_algorithm: "norm" or "value".
        averages: average gradients, floating-point buffers, logs and loss over all devices that will run the step, after
            the backward pass.

    Raises:
        CaptureError: what the step does can't be captured; the text names the user's line.
        ConfigError: the batch has no tensors, or `training_step` returned no loss.
    """
    who = f"{type(module).__name__}.training_step"
    _refuse_hand_made(module)
    rates_shape = [torch.zeros((), dtype=torch.float64) for _ in optimizer.param_groups]

    def run(state: State, rates: list[Tensor], given: Any, logs: _Logs) -> tuple[list[Tensor], Any]:
        installed = Installed(module, optimizer, state, rates)
        with installed.inside(), _attached(module, logs), torch.enable_grad():
            loss = _loss(who, _call(module.training_step, "training_step", given))
            if overrides(module, "on_before_zero_grad"):
                module.on_before_zero_grad(optimizer)
            optimizer.zero_grad(set_to_none=True)
            if overrides(module, "on_before_backward"):
                module.on_before_backward(loss)
            loss.backward()
            learning = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            result, averaged = loss.detach(), set(logs.values)
            if averages:
                result = average_step(learning, loss, logs.values, list(module.buffers()))
            if overrides(module, "on_after_backward"):
                module.on_after_backward()
            with functional.as_compiled():
                if overrides(module, "on_before_optimizer_step"):
                    module.on_before_optimizer_step(optimizer)
                _clip(learning, gradient_clip_val, gradient_clip_algorithm)
                optimizer.step()
            if averages and set(logs.values) != averaged:
                raise CaptureError(f"{who}: several devices can't average what hooks log after the backward pass.")
            return installed.read(), result

    return _settled(who, lambda: _capture(who, module, optimizer, batch, rates_shape, run))


def capture_evaluation(module: Any, batch: Any, stage: str = "validation") -> Captured:
    """Capture `validation_step`, `test_step` or `predict_step`, with the module in evaluation mode.

    Args:
        module: as for `capture_training`; its mode is restored.
        batch: an example; a tree of tensors.
        stage: "validation", "test" or "predict".

    Raises:
        CaptureError: what the step does can't be captured, or it changes a buffer; the text names the user's line.
    """
    name = f"{stage}_step"
    who = f"{type(module).__name__}.{name}"

    def run(state: State, rates: list[Tensor], given: Any, logs: _Logs) -> tuple[list[Tensor], Any]:
        installed = Installed(module, None, state, rates)
        with installed.inside(), _attached(module, logs), torch.no_grad():
            output = _call(getattr(module, name), name, given)
            return installed.read(), pytree.tree_map(
                lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output
            )

    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        return _settled(who, lambda: _capture(who, module, None, batch, [], run))
    finally:
        for part, training in modes:
            part.training = training


def _settled(who: str, capture: Callable[[], tuple[Captured, list[Change]]]) -> Captured:
    """Capture once, and once more when attributes changed, to see whether they change every time."""
    captured, changes = capture()
    refuse_changes(who, [change for change in changes if change.traced])
    if changes:
        captured, changes = capture()
        refuse_changes(who, changes)
    return captured


def _capture(
    who: str,
    module: nn.Module,
    optimizer: Optimizer | None,
    batch: Any,
    rates: list[Tensor],
    run: Callable[[State, list[Tensor], Any, _Logs], tuple[list[Tensor], Any]],
) -> tuple[Captured, list[Change]]:
    """Trace `run` over the state, the rates and the batch: a step that trains if there is an optimizer."""
    trains = optimizer is not None
    leaves, tree = _leaves_of(batch)
    mode = functional.fake_mode()
    with mode:
        state = state_of(module, optimizer)
    inputs = [functional.fake_like(tensor, mode) for tensor in (*state.values(), *rates, *leaves)]
    learning = _learning(module, state) + [False] * (len(rates) + len(leaves))
    logs, changes = _Logs(), Changes(module)
    logs.reads.modes.update((name, part.training) for name, part in module.named_modules())
    output_tree: list[Any] = []

    def whole(traced: list[Tensor]) -> list[Tensor]:
        now = dict(zip(state, traced, strict=False))
        given = pytree.tree_unflatten(traced[len(state) + len(rates) :], tree)
        after, output = run(now, traced[len(state) : len(state) + len(rates)], given, logs)
        returned, returned_tree = pytree.tree_flatten(output)
        output_tree[:] = [returned_tree]
        return [*after, *_tensors(who, returned), *logs.values.values()]

    with explained(who), changes.watched(), CounterWatch():
        graph = functional.trace(whole, inputs, learning)
    if not trains:
        graph = _without_state(who, graph, tuple(state))
    form = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
    captured = Captured(
        who, graph, tuple(state), len(rates), (tree, form), output_tree[0], logs.options, trains, logs.reads
    )
    return captured, changes.found


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
                "alone, anything else would stay what it is in this batch. Leave it out, or make it a tensor."
            )
    if not leaves:
        raise ConfigError("batch: there is no tensor in it.")
    return [leaf for _, leaf in leaves], tree


class _Logs:
    """What a step has given to `self.log`, and what it has read."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.reads = Reads()

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(value, (Tensor, int, float)):
            raise CaptureError(
                f'self.log("{name}", …) was given a {type(value).__name__}:\n    {calling_place()}\n'
                "A captured step logs tensors and numbers; use the metric's functional form (torchmetrics.functional)."
            )
        if isinstance(value, Counter):
            value.refuse()
        self.values[name] = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        self.options[name] = dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False)) | kwargs


@contextmanager
def _attached(module: Any, logs: _Logs) -> Iterator[None]:
    """The module as a step sees it: its class is one whose `log` collects, and whose counters are refused when used."""
    own: Any = type(module)

    def read(self: Any, name: str) -> Any:
        value = own.__getattribute__(self, name)
        if not name.startswith("_") and name != "training" and name in vars(self):
            logs.reads.note(name, value)
        return value

    def log(self: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        logs.log(name, value, *args, **kwargs)

    seen = {
        "__getattribute__": read,
        "log": log,
        "trainer": property(lambda self: CountingTrainer(own.trainer.fget(self))),
        "current_epoch": property(lambda self: Counter("self.current_epoch")),
        "global_step": property(lambda self: Counter("self.global_step")),
    }
    object.__setattr__(module, "__class__", _subclass(own, seen))
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", own)


def _subclass(own: type, attributes: dict[str, Any]) -> type:
    return type(own.__name__, (own,), attributes)


def _call(step: Callable[..., Any], name: str, batch: Any) -> Any:
    arguments = (batch, Counter("batch_idx"), Counter("dataloader_idx"))
    return step(*arguments[: step_arguments(step, name)])


def _loss(who: str, output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f'{who}() returned {type(output).__name__}: expected the loss as a tensor, or a dict with "loss".'
        )
    return loss


def _clip(parameters: list[Tensor], value: float | None, algorithm: str) -> None:
    if not value:
        return
    if algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, value)


def _tensors(who: str, leaves: list[Any]) -> list[Any]:
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, type(None))):
            raise CaptureError(
                f"{who} returned {leaf!r:.60}, a {type(leaf).__name__}: a captured step returns tensors or None."
            )
    return leaves


def _without_state(who: str, graph: GraphModule, paths: tuple[Path, ...]) -> GraphModule:
    """An evaluation's graph without the state among its outputs, once it is sure that it left the state alone."""
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    (outputs,) = nodes[-1].args
    for path, before, after in zip(paths, inputs, outputs, strict=False):
        while after is not before and after.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            after = after.args[0]
        if after is not before:
            raise CaptureError(
                f"{who} changes {'.'.join(path)}; an evaluation that is captured leaves the state alone."
            )
    nodes[-1].args = (list(outputs[len(paths) :]),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _refuse_hand_made(module: Any) -> None:
    """Refuse what replaces parts of the sequence that is captured here."""
    if not getattr(module, "automatic_optimization", True):
        raise CaptureError(f"{type(module).__name__}: manual optimisation can't be captured yet.")
    for name in ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping"):
        if overrides(module, name):
            raise CaptureError(f"{type(module).__name__} overrides {name}, which can't be captured yet.")

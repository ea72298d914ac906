"""The two functions of a step that `compile="step"` compiles: `training_step`, and clipping with the optimizer's step.

`CompiledTrainingStep` is compiled with another `self.log`: it collects, and the values are logged after the call. So the
compiled function computes the logged values, and torch.compile doesn't see the trainer.

`CompiledUpdate` passes learning rates as tensors. A scheduler changes them without a new compilation. Outside the update,
the optimizer's groups keep the numbers, for callbacks and checkpoints.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from footplate.step.phases import clip_gradients
from footplate.step.torch_internals import (
    cannot_be_compiled,
    compile_graph,
    inner_step,
    is_of_torch,
    mark_static,
    note_step_for_scheduler,
    tensor_rate,
    with_own_code,
)

log = logging.getLogger(__name__)

Backend = str | Callable[..., Any]


class CompiledTrainingStep(nn.Module):
    """A module whose `training_step` is compiled.

    Args:
        module: the user's module.
        record: logs a value: (batch, name, value, other arguments of `self.log`).
        backend: of torch.compile.

    Attributes:
        eager: run `training_step` as it is.
    """

    automatic_optimization = True

    def __init__(
        self, module: Any, record: Callable[[Any, str, Any, Mapping[str, Any]], None], backend: Backend
    ) -> None:
        super().__init__()
        self.module = module
        self.eager = False
        self._record = record
        # The parameters of `log`, without the name and the value.
        self._parameter_names = tuple(inspect.signature(module.log).parameters)[2:]
        self._logged: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self._log = _collector(self._logged)

        def run(*arguments: Any) -> Any:
            return module.training_step(*arguments)

        self._compiled = torch.compile(with_own_code(run), backend=backend)

    def training_step(self, *arguments: Any) -> Any:
        """Call the module's `training_step`, and log what it logs."""
        if self.eager:
            return self.module.training_step(*arguments)
        for leaf in pytree.tree_leaves(arguments[0]):
            if isinstance(leaf, Tensor):
                mark_static(leaf)
        attributes = vars(self.module)
        attributes["log"] = self._log
        try:
            output = self._compiled(*arguments)
        finally:
            del attributes["log"]
            logged = self._logged[:]
            self._logged.clear()
        for name, value, args, options in logged:
            options = dict(zip(self._parameter_names, args, strict=False)) | options
            self._record(arguments[0], name, value, options)
        return output


def _collector(logged: list[Any]) -> Callable[..., None]:
    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        # A copy, since the step may change its own tensor in place later on.
        value = value.detach().clone() if isinstance(value, Tensor) else value
        logged.append((name, value, args, options))

    return log


def computes_on(device: torch.device, graph: torch.fx.GraphModule) -> bool:
    """Return True if all inputs and results of a graph are tensors of a kind of device."""
    values = [leaf for node in graph.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("example_value"))]
    return all(isinstance(each, Tensor) and each.device.type == device.type for each in values if each is not None)


class CompiledUpdate:
    """Clipping and the optimizer's step as one compiled function.

    A fused optimizer steps as it is, since its step is one kernel already. So does one whose step can't be compiled as a
    whole.

    Args:
        optimizer: one of torch's own.
        clip_val: the norm or value to clip to; None or 0 for none.
        clip_algorithm: "norm" or "value".
        device: the device of the parameters.
        backend: of torch.compile.

    Attributes:
        on_device: the last call was one compiled program, or one fused step, and has computed on the device alone.
    """

    def __init__(
        self, optimizer: Optimizer, clip_val: float | None, clip_algorithm: str, device: torch.device, backend: Backend
    ) -> None:
        self.on_device = False
        self._optimizer, self._device, self._backend = optimizer, device, backend
        self._rates: list[Tensor] = []
        self._numbers: list[float] = []
        step = inner_step(optimizer)

        def clip() -> None:
            clip_gradients(optimizer, clip_val, clip_algorithm)

        def update() -> None:
            with torch.no_grad():
                clip()
                step(optimizer)

        self._clip, self._plain, self._update = clip, update, update
        self._fused = all(group.get("fused") for group in optimizer.param_groups)
        if not self._fused:
            self._update = torch.compile(with_own_code(update), backend=self._compile, fullgraph=True)
        self._takes_tensors = not self._fused or device.type == "cuda"

    @staticmethod
    def suits(optimizer: Optimizer) -> bool:
        """Return True if an optimizer can be compiled: its step is torch's own, and its learning rates are numbers."""
        groups = optimizer.param_groups
        own = any(isinstance(group["lr"], Tensor) or group.get("differentiable") for group in groups)
        return is_of_torch(optimizer) and not own

    def set_rates(self) -> None:
        """Copy the learning rates of the optimizer's groups into the tensors that the update reads."""
        numbers = [tensor_rate(self._optimizer, group) for group in self._optimizer.param_groups]
        if numbers == self._numbers:
            return
        for index, number in enumerate(numbers):
            if index == len(self._rates):
                self._rates.append(torch.empty((), device=self._device))
            self._rates[index].fill_(number)
        self._numbers = numbers

    def __call__(self) -> None:
        """Clip the gradients, and step."""
        if not is_of_torch(self._optimizer):
            # Somebody has registered hooks, or replaced the step.
            self.on_device = False
            self._clip()
            self._optimizer.step()
            return
        self.on_device = self._fused
        try:
            with self._tensors_in_groups():
                self._update()
        except Exception as error:
            if not cannot_be_compiled(error):
                raise
            # Nothing has run yet.
            log.info("The step of %s is not compiled: %s", type(self._optimizer).__name__, error)
            self._update, self._takes_tensors = self._plain, False
            self._plain()
        note_step_for_scheduler(self._optimizer)

    @contextlib.contextmanager
    def _tensors_in_groups(self) -> Iterator[None]:
        """Let the optimizer's groups have learning rates as tensors, and count steps on the GPU."""
        if not self._takes_tensors:
            yield
            return
        self.set_rates()
        groups = self._optimizer.param_groups
        own = [{name: group[name] for name in ("lr", "capturable") if name in group} for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if self._device.type == "cuda" and "capturable" in group:
                # The compiler moves counts from the CPU to the GPU.
                group["capturable"] = True
        try:
            yield
        finally:
            for group, settings in zip(groups, own, strict=True):
                group.update(settings)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, on_device = compile_graph(self._backend, graph, inputs), computes_on(self._device, graph)

        def run(*inputs: Any) -> Any:
            self.on_device = on_device
            return compiled(*inputs)

        return run

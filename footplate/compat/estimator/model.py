"""A `model_fn` as a `Module`: called for every batch, with torch modules that are made once.

In TensorFlow, a `model_fn` builds a graph and is called once for each mode; a variable is made in the first call and found
by its name afterwards. Here, a `model_fn` is called for each batch. It asks for modules by name, and gets the same module
in each call:

    def model_fn(features, labels, mode, params):
        net = get_module("net", lambda: Net(params["width"]))      # made in the first call, found afterwards
        logits = net(features)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions={"class": logits.argmax(1)})
        loss = F.cross_entropy(logits, labels)
        return EstimatorSpec(mode, loss=loss, train_op=lambda: AdamW(net.parameters(), lr=params["lr"]),
                             eval_metric_ops={"accuracy": (logits.argmax(1) == labels).float().mean()})

Before the first batch of a mode, the `model_fn` is called once with this batch to make the modules. The modules are in
evaluation mode then, so that the call doesn't change batch norm's statistics. Lazy modules get their sizes in this call.
With a compiled accelerator, later calls happen only while the program is captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from footplate.compat.estimator.inout import features_and_labels
from footplate.compat.estimator.spec import MEASURED, TAKEN, EstimatorSpec, ModeKeys
from footplate.core.errors import ConfigError
from footplate.training.module import Module

Made = TypeVar("Made", bound=nn.Module)
ModelFn = Callable[..., EstimatorSpec]


class Parts:
    """The modules of one model during a call of its `model_fn`.

    Args:
        modules: the modules that exist.
        making: True if the call may make more modules.

    Attributes:
        modes: modules, and whether each is in training mode after the call.
    """

    def __init__(self, modules: nn.ModuleDict, making: bool) -> None:
        self.modules = modules
        self.making = making
        self.modes: list[tuple[nn.Module, bool]] = []


_present: ContextVar[Parts | None] = ContextVar("footplate_estimator_parts", default=None)


def get_module(name: str, make: Callable[[], Made]) -> Made:
    """Get a module by name inside a `model_fn`; the first call makes it.

    Args:
        name: part of the tensors' names in checkpoints; without dots.
        make: makes the module.

    Raises:
        ConfigError: called outside a `model_fn`, or a new name in the middle of training.

    Examples:
        >>> def model_fn(features, labels, mode):
        ...     net = get_module("net", lambda: torch.nn.Linear(4, 3))  # the same module in every call
        ...     return EstimatorSpec(mode, predictions=net(features).argmax(1))
    """
    parts = _present.get()
    if parts is None:
        raise ConfigError(
            f'get_module("{name}") was called outside a model_fn. Call it inside the model_fn of an Estimator.'
        )
    if name in parts.modules:
        return parts.modules[name]  # type: ignore[return-value]
    if not parts.making:
        raise ConfigError(
            f"get_module(\"{name}\"): the first call of model_fn in this mode didn't ask for it, so it isn't trained. Ask "
            "for the same modules in every call."
        )
    new_module = make()
    if not isinstance(new_module, nn.Module):
        raise ConfigError(f'get_module("{name}"): expected a torch module, got {type(new_module).__name__}.')
    try:
        parts.modules[name] = new_module
    except KeyError as error:
        raise ConfigError(f"get_module({name!r}): this can't be a module's name ({error.args[0]}).") from error
    parts.modes += [(module, module.training) for module in new_module.modules()]
    return new_module.eval()


class ModelOfFunction(Module):
    """A `model_fn` as a `Module`; see the docstring of this file.

    Args:
        model_fn: takes `features`, and those of `labels`, `mode`, `params` and `config` that it names.
        params: its `params`, by mode.
        config: its `config`.

    Attributes:
        built: the modes whose modules are made.
    """

    def __init__(self, model_fn: ModelFn, params: Mapping[str, Mapping[str, Any]], config: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        self._model_fn = model_fn
        self._names = set(inspect.signature(model_fn).parameters)
        self._params = params
        self._config = config
        self._train_op: Callable[[], Any] | None = None
        self.built: set[str] = set()

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self._model_fn, "__name__", type(self._model_fn).__name__)

    def build(self, mode: str, batch: Any) -> None:
        """Make the modules that the function asks for in a mode, in one call with a batch.

        Raises:
            ConfigError: the function's result can't be used.
        """
        if mode in self.built:
            return
        parts = Parts(self.parts, making=True)
        parts.modes += [(module, module.training) for module in self.modules()]
        self.eval()
        with _in_call(parts):
            spec = self._call(mode, batch)
        if mode == ModeKeys.TRAIN:
            self._train_op = self._checked_train_op(spec)
        self.built.add(mode)

    def answer(self, mode: str, batch: Any) -> EstimatorSpec:
        """Call the function with a batch."""
        with _in_call(Parts(self.parts, making=False)):
            return self._call(mode, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        spec = self.answer(ModeKeys.TRAIN, batch)
        self.log("loss", spec.loss, prog_bar=True)
        assert spec.loss is not None
        return spec.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        spec = self.answer(ModeKeys.EVAL, batch)
        self.log(f"{MEASURED}loss", spec.loss)
        for name, value in spec.metrics().items():
            if name in TAKEN:
                raise ConfigError(
                    f'{self.name}: a metric can\'t be called "{name}", a name that evaluate() uses. Rename it.'
                )
            self.log(f"{MEASURED}{name}", value)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.answer(ModeKeys.PREDICT, batch).predictions

    def configure_optimizers(self) -> Any:
        assert self._train_op is not None
        optimizers = self._train_op()
        if isinstance(optimizers, torch.optim.Optimizer):
            own = {id(parameter) for parameter in self.parameters()}
            trained = (parameter for group in optimizers.param_groups for parameter in group["params"])
            if any(id(parameter) not in own for parameter in trained):
                raise ConfigError(
                    f"{self.name}: the optimizer has parameters of a module that get_module() didn't make, so no "
                    "checkpoint would have them. Make every module inside the model_fn, with get_module(name, make)."
                )
        return optimizers

    def _call(self, mode: str, batch: Any) -> EstimatorSpec:
        features, labels = features_and_labels(batch)
        arguments = {"labels": labels, "mode": mode, "params": self._params[mode], "config": self._config}
        spec = self._model_fn(features, **{name: value for name, value in arguments.items() if name in self._names})
        if not isinstance(spec, EstimatorSpec):
            raise ConfigError(f"{self.name} returned {type(spec).__name__}: expected an EstimatorSpec.")
        needed = "predictions" if mode == ModeKeys.PREDICT else "loss"
        if getattr(spec, needed) is None:
            raise ConfigError(
                f'{self.name} returned an EstimatorSpec without {needed} in mode "{mode}", which needs it.'
            )
        return spec

    def _checked_train_op(self, spec: EstimatorSpec) -> Callable[[], Any]:
        if isinstance(spec.train_op, torch.optim.Optimizer):
            raise ConfigError(
                f"{self.name}: train_op is an optimizer, and each batch would make a new one. Give the function that makes "
                "it: train_op=lambda: torch.optim.AdamW(net.parameters(), lr=…)."
            )
        if not callable(spec.train_op):
            raise ConfigError(
                f"{self.name}: to train, an EstimatorSpec needs train_op, a function without arguments that returns the "
                "optimizer."
            )
        return spec.train_op


class Serving(nn.Module):
    """A module whose `forward` takes features and returns the model's predictions."""

    def __init__(self, model: ModelOfFunction) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any) -> Any:
        return self.model.answer(ModeKeys.PREDICT, features).predictions


@contextmanager
def _in_call(parts: Parts) -> Iterator[None]:
    """Let `get_module` use these parts; afterwards, set each module to training or evaluation mode again."""
    token = _present.set(parts)
    try:
        yield
    finally:
        _present.reset(token)
        for module, training in parts.modes:
            module.training = training

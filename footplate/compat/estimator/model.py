"""A `model_fn` as a `Module`: called for every batch, with torch modules that are made once.

In TensorFlow a `model_fn` builds a graph and is called once for each mode; a variable is made at the first call and found
by its name afterwards. Here it is called for each batch, and what must be the same each time is asked for by name:

    def model_fn(features, labels, mode, params):
        net = get_module("net", lambda: Net(params["width"]))      # made at the first call, found after it
        logits = net(features)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions={"class": logits.argmax(1)})
        loss = F.cross_entropy(logits, labels)
        return EstimatorSpec(mode, loss=loss, train_op=lambda: AdamW(net.parameters(), lr=params["lr"]),
                             eval_metric_ops={"accuracy": (logits.argmax(1) == labels).float().mean()})

Before a mode's first batch there is one call with that batch, in which the modules are made. It is made in evaluation
mode, so that it leaves no trace in batch norm's statistics; lazy modules learn their sizes from it. With a compiled
accelerator, later calls happen where the program is captured.
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
    """The modules of one model: those there are, and whether more may be made."""

    def __init__(self, modules: nn.ModuleDict, making: bool) -> None:
        self.modules = modules
        self.making = making
        self.modes: list[tuple[nn.Module, bool]] = []  # to be set when the call has ended


_present: ContextVar[Parts | None] = ContextVar("footplate_estimator_parts", default=None)


def get_module(name: str, make: Callable[[], Made]) -> Made:
    """Inside a `model_fn`: the module of this name, made at the first call.

    Args:
        name: part of the names in checkpoints; no dots.
        make: makes it.

    Raises:
        ConfigError: called elsewhere, or the name is first heard of in the middle of training.
    """
    parts = _present.get()
    if parts is None:
        raise ConfigError(f'get_module("{name}") is for the inside of a model_fn, which the Estimator calls.')
    if name in parts.modules:
        return parts.modules[name]  # type: ignore[return-value]
    if not parts.making:
        raise ConfigError(
            f"get_module(\"{name}\"): the first call of model_fn in this mode didn't ask for it, so it isn't trained. Ask "
            "for the same modules at every call."
        )
    made = make()
    if not isinstance(made, nn.Module):
        raise ConfigError(f'get_module("{name}"): expected a torch module, got {type(made).__name__}.')
    try:
        parts.modules[name] = made
    except KeyError as error:
        raise ConfigError(f"get_module({name!r}): this can't be a module's name ({error.args[0]}).") from error
    parts.modes += [(module, module.training) for module in made.modules()]
    return made.eval()


class ModelOfFunction(Module):
    """See the module's docstring.

    Args:
        model_fn: takes `features`, and of `labels`, `mode`, `params` and `config` those that it names.
        params: given to it, by mode.
        config: given to it.
    """

    def __init__(self, model_fn: ModelFn, params: Mapping[str, Mapping[str, Any]], config: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        self._model_fn = model_fn
        self._names = set(inspect.signature(model_fn).parameters)
        self._params = params
        self._config = config
        self._train_op: Callable[[], Any] | None = None
        self.built: set[str] = set()  # modes whose modules are made

    @property
    def name(self) -> str:
        """What its function is called."""
        return getattr(self._model_fn, "__name__", type(self._model_fn).__name__)

    def build(self, mode: str, batch: Any) -> None:
        """Make the modules that the function asks for in a mode, by one call with a batch.

        Raises:
            ConfigError: what the function returned can't be used.
        """
        if mode in self.built:
            return
        parts = Parts(self.parts, making=True)
        parts.modes += [(module, module.training) for module in self.modules()]
        self.eval()
        with _asking(parts):
            spec = self._call(mode, batch)
        if mode == ModeKeys.TRAIN:
            self._train_op = self._checked_train_op(spec)
        self.built.add(mode)

    def answer(self, mode: str, batch: Any) -> EstimatorSpec:
        """What the function answers for a batch."""
        with _asking(Parts(self.parts, making=False)):
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
                raise ConfigError(f'{self.name}: a metric can\'t be called "{name}", which evaluate() has of its own.')
            self.log(f"{MEASURED}{name}", value)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.answer(ModeKeys.PREDICT, batch).predictions

    def configure_optimizers(self) -> Any:
        assert self._train_op is not None
        found = self._train_op()
        if isinstance(found, torch.optim.Optimizer):
            own = {id(one) for one in self.parameters()}
            if any(id(one) not in own for group in found.param_groups for one in group["params"]):
                raise ConfigError(
                    f"{self.name}: the optimizer has parameters that are of no module from get_module(), so they would be "
                    "in no checkpoint. Make every module inside the model_fn, by get_module(name, make)."
                )
        return found

    def _call(self, mode: str, batch: Any) -> EstimatorSpec:
        features, labels = features_and_labels(batch)
        given = {"labels": labels, "mode": mode, "params": self._params[mode], "config": self._config}
        spec = self._model_fn(features, **{name: value for name, value in given.items() if name in self._names})
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
                f"{self.name}: train_op is an optimizer, which would be a new one for every batch. Give the function that "
                "makes it: train_op=lambda: torch.optim.AdamW(net.parameters(), lr=…)."
            )
        if not callable(spec.train_op):
            raise ConfigError(
                f"{self.name}: to train, an EstimatorSpec needs train_op, a function without arguments that returns the "
                "optimizer."
            )
        return spec.train_op


class Serving(nn.Module):
    """The predictions of a model as a `forward` of its features."""

    def __init__(self, model: ModelOfFunction) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any) -> Any:
        return self.model.answer(ModeKeys.PREDICT, features).predictions


@contextmanager
def _asking(parts: Parts) -> Iterator[None]:
    """Where `get_module` is about these parts; afterwards each is in the mode that it is to be in."""
    token = _present.set(parts)
    try:
        yield
    finally:
        _present.reset(token)
        for module, training in parts.modes:
            module.training = training

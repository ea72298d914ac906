"""Attributes that a step reads: constants of its program, as long as nobody changes them.

The attributes that the step reads of the module and its submodules (`self.temperature`, `self.net.dropout.p`, a list or
dictionary of these, a function) are recorded with their values and lines. So are the classes and modes of all
submodules, and the shapes of all tensors. `Reads.changes` finds later which of them have changed, so that the caller
can capture the step again.

A number that is known to change can also be *fed*: during capture, `fed` replaces it by an object with which it becomes
an input of the program (`symbolic_scalars.py`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from footplate.core.hashing import hashed
from footplate.step.xla.capture.arithmetic import Number
from footplate.step.xla.capture.refusals import calling_place
from footplate.step.xla.capture.torch_tracing import is_traced

PLAIN = (bool, int, float, str, type(None))

Attribute = tuple[str, str]
"""The name of a module inside the captured module ("" for the captured module itself), and the attribute's name."""


@dataclass(frozen=True)
class Changed:
    """An attribute that has changed since the capture.

    Attributes:
        attribute: its owner and name.
        text: a sentence with both values and the line that reads it.
        is_number: it was and is a number, which can be fed.
    """

    attribute: Attribute
    text: str
    is_number: bool


@dataclass
class Reads:
    """The attributes and optimizer settings that a program is made from.

    Attributes:
        attributes: attribute → (its snapshot, the line that read it first).
        form: see `form_of`.
        settings: see `torch_optimizers.settings`.
    """

    attributes: dict[Attribute, tuple[Any, str]] = field(default_factory=dict)
    form: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def noted(self, module: nn.Module) -> Iterator[None]:
        """Record the attributes that are read from a module and its submodules in this block."""
        names = {id(part): name for name, part in module.named_modules()}
        read = object.__getattribute__

        def read_and_note(part: nn.Module, name: str) -> Any:
            value = read(part, name)
            if name not in _MODULES_OWN and id(part) in names and _is_data(part, name, value):
                attribute = names[id(part)], name
                if attribute not in self.attributes:
                    seen = snapshot(value)
                    if seen is not OPAQUE:
                        self.attributes[attribute] = seen, calling_place()
            return value

        nn.Module.__getattribute__ = read_and_note  # type: ignore[method-assign]
        try:
            yield
        finally:
            del nn.Module.__getattribute__

    def changes(self, module: nn.Module) -> list[Changed]:
        """The attributes that have changed since the capture."""
        parts = dict(module.named_modules())
        changed = []
        for attribute, (before, where) in self.attributes.items():
            owner, name = attribute
            if owner not in parts or not (name in vars(parts[owner]) or hasattr(type(parts[owner]), name)):
                continue
            now = snapshot(getattr(parts[owner], name))
            if not _alike(now, before):
                text = (
                    f"self.{owner + '.' if owner else ''}{name} was {before!r:.60} when the step was captured and is "
                    f"{now!r:.60} now; read at {where}"
                )
                changed.append(Changed(attribute, text, is_number(before) and type(now) is type(before)))
        form = form_of(module)
        for name in {**self.form, **form}:
            before, now = self.form.get(name, "nothing"), form.get(name, "nothing")
            if before != now:
                text = f"{name or 'the module'} was {before} when the step was captured and is {now} now"
                changed.append(Changed((name, ""), text, False))
        return changed

    def changed_settings(self, now: Mapping[str, Any]) -> list[str]:
        """A sentence for each setting of an optimizer that has changed."""
        before = self.settings
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return [f"{name} was {before.get(name)!r} and is {now.get(name)!r} now" for name in names]


def form_of(module: nn.Module) -> dict[str, str]:
    """The class, mode and hooks of each part of a module, and the shape and type of each of its tensors, by name."""
    form = {
        name: f"a {type(part).__qualname__} in {'training' if part.training else 'evaluation'} mode{_hooks_of(part)}"
        for name, part in module.named_modules()
    }
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        form[name] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return form


def is_number(value: Any) -> bool:
    """Return True for an integer or a float, and False for a bool."""
    return type(value) in (int, float)


@contextmanager
def fed(module: nn.Module, numbers: Mapping[Attribute, Any]) -> Iterator[None]:
    """Replace numbers of a module in a block."""
    parts = dict(module.named_modules())
    before = {(owner, name): vars(parts[owner])[name] for owner, name in numbers}
    try:
        for (owner, name), number in numbers.items():
            vars(parts[owner])[name] = number
        yield
    finally:
        for (owner, name), value in before.items():
            vars(parts[owner])[name] = value


class _Opaque:
    def __repr__(self) -> str:
        return "something else"


OPAQUE = _Opaque()
"""The snapshot of a value that isn't compared."""


def snapshot(value: Any, depth: int = 4) -> Any:
    """Return a value that stands for an attribute's value in comparisons.

    A plain value is its own snapshot. Containers and records get a container of their values' snapshots. A tensor that
    isn't registered becomes a constant of the program: it is compared by its identity and by torch's count of its
    changes. A function, or an object of another class, is compared by its identity, as the step may read any part of
    it. The snapshot of a value that stands for something else while a step is captured is `OPAQUE`.
    """
    if isinstance(value, PLAIN):
        return value
    if is_traced(value) or isinstance(value, (Number, nn.Parameter)) or depth == 0:
        return OPAQUE
    if isinstance(value, Tensor):
        return _TensorSnapshot(value, _version(value))
    if isinstance(value, (list, tuple)) and len(value) <= _MOST:
        return (list if isinstance(value, list) else tuple)(snapshot(item, depth - 1) for item in value)
    if isinstance(value, dict) and len(value) <= _MOST:
        return {name: snapshot(item, depth - 1) for name, item in value.items() if isinstance(name, PLAIN)}
    if isinstance(value, (set, frozenset)) and len(value) <= _MOST and all(isinstance(item, PLAIN) for item in value):
        return frozenset(value)
    if isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES:
        return _Array(value.shape, hashed(value))
    if isinstance(value, (SimpleNamespace, Namespace)) or (is_dataclass(value) and not isinstance(value, type)):
        return snapshot(dict(vars(value)), depth - 1)
    return _Same(value)


def _is_data(part: nn.Module, name: str, value: Any) -> bool:
    """Return True for an attribute of the module itself, or a plain one of its class, which a hook may override."""
    if name in object.__getattribute__(part, "__dict__"):
        return True
    return isinstance(value, (*PLAIN, list, tuple, dict)) and any(
        vars(kind).get(name) is value for kind in type(part).__mro__
    )


# Longer lists and dictionaries, and larger arrays, are compared by identity.
_MOST = 1000
_MOST_BYTES = 1 << 20
_MODULES_OWN = {*vars(nn.Module()), "_trainer", "_fabric"}


def _alike(now: Any, before: Any) -> bool:
    """Return True if two snapshots would give the same program. 2 and 2.0 don't: they give tensors of different types."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(_alike, now, before))
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_alike(value, before[name]) for name, value in now.items())
    # The second condition holds for two NaNs.
    return bool(now == before) or (now != now and before != before)


def _hooks_of(part: nn.Module) -> str:
    """Describe the hooks that are registered on a module, by the numbers of their handles. It ends a description."""
    kinds = (part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks)
    handles = [str(number) for hooks in kinds for number in hooks]
    return f" with hooks {', '.join(handles)}" if handles else ""


@dataclass(frozen=True)
class _Array:
    """A NumPy array, compared by its values."""

    shape: tuple[int, ...]
    values: str

    def __repr__(self) -> str:
        return f"an array of shape {self.shape} ({self.values[:8]})"


@dataclass(frozen=True)
class _TensorSnapshot:
    tensor: Tensor
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorSnapshot) and self.tensor is other.tensor and self.version == other.version

    def __repr__(self) -> str:
        return f"a tensor of shape {tuple(self.tensor.shape)}, changed {self.version} times"


@dataclass(frozen=True)
class _Same:
    """An object or function, compared by identity; a value such as a type or a device may also be equal."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or type(self.value) is not type(other.value):
            return False
        alike = isinstance(self.value, Hashable) and bool(self.value == other.value)
        return alike or self.value is other.value

    def __repr__(self) -> str:
        return repr(self.value)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version

"""Changes that a step makes to Python's objects.

Python runs a captured step once, so a change to Python's objects happens once. Two things follow:

- An attribute that every run of the step changes (`self.seen += 1`, `self.outputs.append(loss)`) would stay constant.
  It is refused, with its line. An attribute that only the first run sets, such as a cache of a plain value, is allowed.
  `tracing.py` captures a second time after a change, to tell the two apart.
- Draws from Python's and NumPy's generators would be the same in every step. They are refused.

`attribute_guards.py` handles what a step reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from footplate.step.xla.capture.arithmetic import Number
from footplate.step.xla.capture.attribute_guards import PLAIN
from footplate.step.xla.capture.refusals import CaptureError, calling_place
from footplate.step.xla.capture.torch_tracing import is_traced, pytree


@dataclass(frozen=True)
class Change:
    """An attribute that the step has changed: its owner's name, its own name, and the line."""

    owner: str
    name: str
    where: str
    traced: bool

    def __str__(self) -> str:
        return f"self.{self.owner + '.' if self.owner else ''}{self.name}"


class Changes:
    """Watches all attributes of a module's tree while a step runs. `changed` has the changes."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = list(module.named_modules())
        self._places: dict[tuple[int, str], str] = {}
        self.changed: list[Change] = []
        self._before: list[dict[str, Any]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Collect the changes of this block. Traced tensors that were left in attributes are removed."""
        plain_set = nn.Module.__setattr__

        def set_and_note(module: nn.Module, name: str, value: Any) -> None:
            self._places[id(module), name] = calling_place()
            plain_set(module, name, value)

        before = [(dict(vars(owner)), _sizes(owner)) for _, owner in self._owners]
        draws = (random.getstate(), np.random.get_state(legacy=False))
        nn.Module.__setattr__ = set_and_note  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__setattr__ = plain_set  # type: ignore[method-assign]
            for (name, owner), (values, sizes) in zip(self._owners, before, strict=True):
                self._compare(name, owner, values, sizes)
        _refuse_draws(*draws)

    def _compare(self, owner_name: str, owner: nn.Module, values: dict[str, Any], sizes: dict[str, int]) -> None:
        sizes_now = _sizes(owner)
        for name, value in list(vars(owner).items()):
            if name in ("_parameters", "_buffers", "_modules", "_trainer"):
                continue
            grown = name in sizes and sizes_now.get(name) != sizes[name] and values.get(name) is value
            if not grown and name in values and (values[name] is value or _same(values[name], value)):
                continue
            leaves = pytree.tree_leaves(value)
            where = self._places.get((id(owner), name), "a change in place")
            traced = any(is_traced(leaf) or isinstance(leaf, Number) for leaf in leaves)
            # torch's own modules may assign such values: nn.GRU makes a new list of its parameters each time.
            torchs_own = type(owner).__module__.startswith("torch.nn.")
            if not torchs_own and (traced or isinstance(value, (*PLAIN, list, dict, set, tuple))):
                self.changed.append(Change(owner_name, name, where, traced))
            if traced and not grown:
                if name in values:
                    vars(owner)[name] = values[name]
                else:
                    del vars(owner)[name]


def _sizes(owner: nn.Module) -> dict[str, int]:
    kept = (list, dict, set)
    return {
        name: len(value)
        for name, value in vars(owner).items()
        if isinstance(value, kept) and isinstance(value, Sized) and not name.startswith("_")
    }


def _same(first: Any, second: Any) -> bool:
    return isinstance(first, PLAIN) and isinstance(second, PLAIN) and type(first) is type(second) and first == second


def _refuse_draws(python: Any, numpy: Any) -> None:
    drawn = [
        name
        for name, same in (
            ("random", random.getstate() == python),
            ("numpy.random", _same_generator(np.random.get_state(legacy=False), numpy)),
        )
        if not same
    ]
    if drawn:
        raise CaptureError(
            f"the step draws from {' and '.join(drawn)}: captured once, it would use the same number in every step. "
            "Draw with torch (torch.rand, F.dropout), which draws again in each step."
        )


def _same_generator(first: Any, second: Any) -> bool:
    return first["state"]["pos"] == second["state"]["pos"] and bool(
        np.array_equal(first["state"]["key"], second["state"]["key"])
    )


def refuse_changes(step_name: str, changes: list[Change]) -> None:
    """Refuse a step that leaves tensors behind in attributes, or changes attributes each time it runs."""
    if not changes:
        return
    lines = "\n".join(f"    {change}: {change.where}" for change in changes)
    raise CaptureError(
        f"{step_name} changes attributes. Python runs a captured step once, so it would change them once and "
        f"never again:\n{lines}\n"
        "Keep numbers that the step advances in buffers (self.register_buffer), return or self.log what you want to "
        "know, and collect it in a hook between steps (on_train_batch_end)."
    )

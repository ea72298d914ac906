"""Numbers that change from step to step: inputs of the program, or decisions between programs.

`batch_idx`, `current_epoch` and `global_step` are plain numbers. A captured step that read one would silently keep its
value in all later steps: a warm-up that never ends, a schedule that never moves. So during capture each of them is a
`Number`, which knows its value at that moment and how it is computed:

    beta = min(1.0, self.global_step / 1000)    a Number, computed from global_step
    loss = loss + beta * kl                     where it meets a tensor, it becomes an input of the graph
    if self.current_epoch < 5:                  a decision: the graph holds as long as the answer is the same

Python computes a Number again before each step (`Counted.values`), in Python's own arithmetic, so the step gets the
same number as in eager torch. `min`, `max`, the functions of `math` and NumPy's of plain numbers may be a part of that.
Another answer needs another graph. Everything else that asks for a Number's value (a text, an index, `float()`) is
refused, with the line.

Attributes of the module that are numbers and known to change (`attribute_guards.py`) are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from footplate.step.xla.capture.arithmetic import Number, Present
from footplate.step.xla.capture.attribute_guards import Attribute, is_number
from footplate.step.xla.capture.refusals import CaptureError, calling_place

MOST = 64
"""The limit for numbers of one step that become inputs."""


@dataclass(frozen=True)
class Decision:
    """A question that was answered while a step was captured.

    Attributes:
        ask: asks the question again.
        answer: the answer that the graph is made for.
        text: the subject of the question: a number, or an attribute of the trainer.
        where: the line that asked.
    """

    ask: Callable[[Present], Any]
    answer: Any
    text: str
    where: str

    def __str__(self) -> str:
        return f"{self.where} ({self.text} was {self.answer!r})"

    def holds(self, present: Present) -> bool:
        """Return True if the answer is still the same."""
        now = self.ask(present)
        return type(now) is type(self.answer) and now == self.answer


@dataclass(frozen=True)
class Counted:
    """The counters in a graph.

    Attributes:
        numbers: its inputs.
        decisions: the decisions that it was made for, in order.
    """

    numbers: tuple[Number, ...] = ()
    decisions: tuple[Decision, ...] = ()

    def broken(self, present: Present) -> Decision | None:
        """The first decision whose answer has changed."""
        return next((decision for decision in self.decisions if not decision.holds(present)), None)

    def values(self, present: Present) -> list[float]:
        """The current values of the inputs."""
        return [float(number.now(present)) for number in self.numbers]


class Counters:
    """The counters during a capture.

    Args:
        present: their values.
        floating: the type of Python's floats among tensors.

    Attributes:
        inputs: tensors for the numbers that become inputs; set at the beginning of the graph.
        steps: the optimizer steps of the captured step so far.
    """

    def __init__(self, present: Present, floating: torch.dtype) -> None:
        self.floating = floating
        self.inputs: Sequence[Tensor] = ()
        self.steps = 0
        self._present = present
        self._values = {name: present(name) for name in ("batch_idx", "current_epoch", "global_step")}
        self._numbers: list[Number] = []
        self._decisions: list[Decision] = []

    @property
    def counted(self) -> Counted:
        """The inputs and decisions so far."""
        return Counted(tuple(self._numbers), tuple(self._decisions))

    def number(self, name: str) -> Number:
        """A counter with its current value in the step."""
        value = self._values[name]
        counter = Number(self, lambda present: present(name), (), value, f"self.{name}".replace("self.batch", "batch"))
        return counter + self.steps if name == "global_step" and self.steps else counter

    def attributes(self, fed: Iterable[Attribute]) -> dict[Attribute, Number]:
        """The `Number`s for fed attributes of the module and its submodules."""
        return {attribute: self._attribute(*attribute) for attribute in fed}

    def _attribute(self, owner: str, name: str) -> Number:
        def read(present: Present) -> Any:
            return getattr(present.module.get_submodule(owner), name)

        text = f"self.{owner + '.' if owner else ''}{name}"
        self.decide(lambda present: is_number(read(present)), True, f"{text} being a number")
        return Number(self, read, (), read(self._present), text)

    def decide(self, ask: Callable[[Present], Any], answer: Any, text: str) -> Any:
        """Record an answer on which the graph depends; return it."""
        self._decisions.append(Decision(ask, answer, text, calling_place()))
        return answer

    def place(self, number: Number) -> int:
        """Make a number an input; return its index."""
        if len(self._numbers) == MOST:
            number.refuse(f" (and {MOST} others that are inputs already)")
        self._numbers.append(number)
        # An integer among tensors gives another program than a fraction.
        if isinstance(number.value, int):
            self.decide(lambda present: isinstance(number.now(present), int), True, f"{number.text} being an integer")
        return len(self._numbers) - 1


class CountingTrainer:
    """A trainer as a step sees it: counters are `Number`s, and the graph depends on each plain value that is read."""

    def __init__(self, trainer: Any, counters: Counters) -> None:
        self._trainer, self._counters = trainer, counters

    def __getattr__(self, name: str) -> Any:
        if name in ("current_epoch", "global_step"):
            return self._counters.number(name)
        if name in _CHANGING:
            raise CaptureError(
                f"self.trainer.{name} is used in a step that is captured once, where its value would never change:\n"
                f"    {calling_place()}\n"
                "Keep the value that the step needs in a buffer or an attribute, and set it in a hook between steps."
            )
        value = getattr(self._trainer, name)
        if isinstance(value, (bool, int, float, str, type(None))):
            self._counters.decide(lambda present: present(name), value, f"self.trainer.{name}")
        return value


_CHANGING = (
    "progress", "callback_metrics", "logged_metrics", "progress_bar_metrics", "latest_metrics", "logs_this_step",
    "is_last_batch", "lr_scheduler_configs",
)  # fmt: skip

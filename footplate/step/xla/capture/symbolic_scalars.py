"""Numbers that change from step to step: inputs of the program, or what decides which program it is.

`batch_idx`, `current_epoch` and `global_step` are plain numbers. A captured step that read one would keep the value of
the moment of capture for ever, silently: a warm-up that never ends, a schedule that never moves. So while a step is
captured each of them is a `Number`, which knows its value at that moment and how it is computed:

    beta = min(1.0, self.global_step / 1000)    a Number, computed of global_step
    loss = loss + beta * kl                     where it meets a tensor, it becomes an input of the graph
    if self.current_epoch < 5:                  a decision: the graph holds as long as the answer is the same

Python computes a Number anew before each step (`Counted.values`), in Python's own arithmetic, so the step is given
exactly what eager torch would be. `min`, `max`, the functions of `math` and NumPy's of plain numbers may be a part of
that. Another answer needs another graph. Everything else that asks for a Number's value (a text, an index, `float()`)
is refused, with the line.

Numbers among the module's attributes that are known to change (`attribute_guards.py`) are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from footplate.step.xla.capture.arithmetic import Number
from footplate.step.xla.capture.attribute_guards import Attribute, is_number
from footplate.step.xla.capture.refusals import CaptureError, calling_place

MOST = 64
"""How many numbers of one step may become inputs."""


@dataclass(frozen=True)
class Present:
    """What counters are, now or some steps ahead.

    Attributes:
        module: whose.
        batch_idx: the index of the batch.
        ahead: how many optimizer steps will have been made by then.
    """

    module: Any
    batch_idx: int = 0
    ahead: int = 0

    def __call__(self, name: str) -> Any:
        """`batch_idx`, `current_epoch`, `global_step`, or an attribute of the trainer."""
        if name == "batch_idx":
            return self.batch_idx
        if name == "global_step":
            return self.module.global_step + self.ahead
        return self.module.current_epoch if name == "current_epoch" else getattr(self.module.trainer, name)


@dataclass(frozen=True)
class Decision:
    """A question that was answered while a step was captured.

    Attributes:
        ask: what asks it anew.
        answer: which the graph is made for.
        text: what was asked: a number, or a trainer's attribute.
        place: the line that asked.
    """

    ask: Callable[[Present], Any]
    answer: Any
    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.place} ({self.text} was {self.answer!r})"

    def holds(self, present: Present) -> bool:
        """Whether the answer is still the same."""
        now = self.ask(present)
        return type(now) is type(self.answer) and now == self.answer


@dataclass(frozen=True)
class Counted:
    """What a graph has to do with counters.

    Attributes:
        numbers: those that are its inputs.
        decisions: those that it was made from, in the order in which they were made.
    """

    numbers: tuple[Number, ...] = ()
    decisions: tuple[Decision, ...] = ()

    def broken(self, present: Present) -> Decision | None:
        """The first decision that would now be another one."""
        return next((one for one in self.decisions if not one.holds(present)), None)

    def values(self, present: Present) -> list[float]:
        """What the inputs are now."""
        return [float(number.now(present)) for number in self.numbers]


class Counters:
    """What becomes of counters while a step is captured.

    Args:
        present: their values.
        floating: the type that Python's floats have among tensors.

    Attributes:
        inputs: tensors that stand for the numbers to come; set when the graph is begun.
        steps: how many optimizer steps the captured step has made so far.
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
        """What has been computed and decided so far."""
        return Counted(tuple(self._numbers), tuple(self._decisions))

    def number(self, name: str) -> Number:
        """A counter, as the step sees it at this moment."""
        value = self._values[name]
        counter = Number(self, lambda present: present(name), (), value, f"self.{name}".replace("self.batch", "batch"))
        return counter + self.steps if name == "global_step" and self.steps else counter

    def attributes(self, fed: Iterable[Attribute]) -> dict[Attribute, Number]:
        """Numbers among the attributes of the module and its submodules, as the step is to see them."""
        return {one: self._attribute(*one) for one in fed}

    def _attribute(self, owner: str, name: str) -> Number:
        def read(present: Present) -> Any:
            return getattr(present.module.get_submodule(owner), name)

        text = f"self.{owner + '.' if owner else ''}{name}"
        self.decide(lambda present: is_number(read(present)), True, f"{text} being a number")
        return Number(self, read, (), read(self._present), text)

    def decide(self, ask: Callable[[Present], Any], answer: Any, text: str) -> Any:
        """Note an answer on which the graph depends; returns it."""
        self._decisions.append(Decision(ask, answer, text, calling_place()))
        return answer

    def place(self, number: Number) -> int:
        """Make a number an input; returns its place among them."""
        if len(self._numbers) == MOST:
            number.refuse(f" (and {MOST} others that are inputs already)")
        self._numbers.append(number)
        if isinstance(number.value, int):  # it is one among tensors: a fraction would be another program
            self.decide(lambda present: isinstance(number.now(present), int), True, f"{number.text} being an integer")
        return len(self._numbers) - 1


class CountingTrainer:
    """A trainer as a step sees it: counters are `Number`s, and on whatever plain value is read the graph depends."""

    def __init__(self, trainer: Any, counters: Counters) -> None:
        self._trainer, self._counters = trainer, counters

    def __getattr__(self, name: str) -> Any:
        if name in ("current_epoch", "global_step"):
            return self._counters.number(name)
        if name in _CHANGING:
            raise CaptureError(
                f"self.trainer.{name} is used in a step that is captured once, where it would stay what it is now:\n"
                f"    {calling_place()}\n"
                "Keep what the step needs of it in a buffer or an attribute, which a hook between steps sets."
            )
        value = getattr(self._trainer, name)
        if isinstance(value, (bool, int, float, str, type(None))):
            self._counters.decide(lambda present: present(name), value, f"self.trainer.{name}")
        return value


_CHANGING = (
    "progress", "callback_metrics", "logged_metrics", "progress_bar_metrics", "latest_metrics", "logs_this_step",
    "is_last_batch", "lr_scheduler_configs",
)  # fmt: skip

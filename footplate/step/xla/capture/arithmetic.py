"""Python's arithmetic with numbers that change from step to step, recorded to be repeated before each step.

`symbolic_scalars.py` says which numbers these are, and what becomes of them.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from footplate.step.xla.capture.refusals import CaptureError, calling_place

Method = Callable[..., Any]


@dataclass(frozen=True)
class Present:
    """The values of the counters, now or some steps ahead.

    Attributes:
        module: the module.
        batch_idx: the index of the batch.
        ahead: the optimizer steps until then.
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


class Counters(Protocol):
    """The counters that a `Number` is computed from; `symbolic_scalars.Counters` are the counters of a capture."""

    floating: torch.dtype
    inputs: Sequence[Tensor]

    def place(self, number: Number) -> int:
        """Make a number an input; return its index."""
        ...

    def decide(self, ask: Callable[[Present], Any], answer: Any, text: str) -> Any:
        """Record an answer on which the graph depends; return it."""
        ...


def _arithmetic(function: Callable[..., Any]) -> Method:
    def method(self: Number, *operands: Any) -> Any:
        return computed(function, self, *operands) if all(map(_is_plain, operands)) else NotImplemented

    return method


def _operator(function: Callable[..., Any]) -> tuple[Method, Method]:
    """The method of an operator, and its reflected method."""
    return _arithmetic(function), _arithmetic(lambda right, left: function(left, right))


def _comparison(function: Callable[..., Any]) -> Method:
    def method(self: Number, other: Any) -> Any:
        return computed(function, self, other).decide() if _is_plain(other) else NotImplemented

    return method


def _refusal(self: Number, *_: Any) -> NoReturn:
    self.refuse()


class Number:
    """A number computed from counters. `value` is its value at the moment of capture.

    Only Python's arithmetic and comparisons, and torch, may use it.
    """

    def __init__(
        self, counters: Counters, function: Callable[..., Any], operands: tuple[Any, ...], value: Any, text: str
    ) -> None:
        self.value, self.text = value, text
        self._counters, self._function, self._operands = counters, function, operands
        self._index: int | None = None

    def now(self, present: Present) -> Any:
        """Compute the number for the next step."""
        if not self._operands:
            return self._function(present)
        return self._function(
            *(operand.now(present) if isinstance(operand, Number) else operand for operand in self._operands)
        )

    def tensor(self) -> Tensor:
        """Return the number as a tensor of no dimensions, which is an input of the graph."""
        if self._index is None:
            self._index = self._counters.place(self)
        kind = torch.int64 if isinstance(self.value, int) else self._counters.floating
        return self._counters.inputs[self._index].to(kind)

    def decide(self) -> bool:
        """Return the number's truth. The graph depends on this decision from here on."""
        return self._counters.decide(lambda present: bool(self.now(present)), bool(self.value), self.text)

    def refuse(self, why: str = "") -> NoReturn:
        """Raise an error that names the line and the alternative."""
        raise CaptureError(
            f"{self.text} is used{why} in a step that is captured once, where its value would never change:\n"
            f"    {calling_place()}\n"
            "A captured step may compute with it (also with min, max and math.exp, called by these names), multiply "
            "tensors with it, log it, and compare it with other numbers. Do the rest in a hook between "
            "steps (on_train_batch_end, on_train_epoch_start)."
        )

    def __bool__(self) -> bool:
        return self.decide()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _with_tensors(func, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        if method != "__call__" or options or not all(map(_is_plain, operands)):
            self.refuse()
        return computed(lambda *values: ufunc(*values).item(), *operands)

    def __array__(self, *_: Any, **__: Any) -> Any:
        self.refuse()

    def __round__(self, digits: int | None = None) -> Number:
        return computed(round, self, digits)

    __add__, __radd__ = _operator(operator.add)
    __sub__, __rsub__ = _operator(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv)
    __floordiv__, __rfloordiv__ = _operator(operator.floordiv)
    __mod__, __rmod__ = _operator(operator.mod)
    __pow__, __rpow__ = _operator(operator.pow)
    __and__, __rand__ = _operator(operator.and_)
    __or__, __ror__ = _operator(operator.or_)
    __xor__, __rxor__ = _operator(operator.xor)
    __lshift__, __rlshift__ = _operator(operator.lshift)
    __rshift__, __rrshift__ = _operator(operator.rshift)
    __neg__, __pos__, __invert__ = map(_arithmetic, (operator.neg, operator.pos, operator.invert))
    __abs__, __floor__, __ceil__, __trunc__ = map(_arithmetic, (abs, math.floor, math.ceil, math.trunc))
    __lt__, __le__, __gt__, __ge__ = map(_comparison, (operator.lt, operator.le, operator.gt, operator.ge))
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __int__ = __float__ = __complex__ = __index__ = __divmod__ = __rdivmod__ = __iter__ = __len__ = _refusal
    __str__ = __repr__ = __format__ = __hash__ = _refusal


def _is_plain(value: Any) -> bool:
    return isinstance(value, (Real, Number))


def computed(function: Callable[..., Any], *operands: Any) -> Number:
    """The `Number` that a function computes from numbers of which some are `Number`s."""
    mine = [operand for operand in operands if isinstance(operand, Number)]
    value = function(*(operand.value if isinstance(operand, Number) else operand for operand in operands))
    return Number(mine[0]._counters, function, operands, value, _text(mine))


def _text(operands: list[Number]) -> str:
    names = sorted({operand.text.removeprefix("a number made of ") for operand in operands})
    return f"a number made of {' and '.join(names)}"


class NumbersAsInputs(TorchFunctionMode):
    """Turns `Number`s among the arguments of torch's functions into inputs of the graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A function written in Python reads numbers and computes with them, and then calls functions that take tensors.
        if isinstance(func, FunctionType):
            return func(*args, **(kwargs or {}))
        return _with_tensors(func, args, kwargs or {})


def _with_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch with tensors instead of `Number`s."""
    numbers = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Number)]
    if not numbers:
        return func(*args, **kwargs)
    if func in (torch.tensor, torch.as_tensor):
        whole = isinstance(numbers[0].value, int)
        return numbers[0].tensor().to(kwargs.get("dtype") or (torch.int64 if whole else torch.get_default_dtype()))
    met = next(
        (argument.dtype for argument in args if isinstance(argument, Tensor) and argument.is_floating_point()), None
    )
    try:
        return func(
            *(_as_tensor(argument, met) for argument in args),
            **{name: _as_tensor(argument, met) for name, argument in kwargs.items()},
        )
    except TypeError as error:
        numbers[0].refuse(f" where torch takes only plain numbers ({str(error).splitlines()[0]})")


def _as_tensor(value: Any, met: torch.dtype | None) -> Any:
    """A number as a tensor. A fraction takes the type that it meets, as a Python float does."""
    if not isinstance(value, Number):
        return value
    return value.tensor() if met is None or isinstance(value.value, int) else value.tensor().to(met)


@contextmanager
def pythons_functions() -> Iterator[None]:
    """Let `min`, `max` and the functions of `math` compute with `Number`s in this block."""
    of_math = [(math, name) for name in dir(math) if isinstance(getattr(math, name), BuiltinFunctionType)]
    kept = [(owner, name, getattr(owner, name)) for owner, name in [*of_math, (builtins, "min"), (builtins, "max")]]
    for owner, name, function in kept:
        setattr(owner, name, _computing(function))
    try:
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def _computing(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not any(isinstance(argument, Number) for argument in args) or not all(map(_is_plain, args)):
            return function(*args, **kwargs)
        return computed(function, *args)

    return call

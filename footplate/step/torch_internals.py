"""Private names of torch that the eager step uses, each behind a function.

1. The calls of an optimizer, without the records that torch makes of them for a profiler (`stepper`, `clearer`).
2. The import of torch's compiler, which training without `torch.compile` doesn't need (`delay_compiler`).
3. Modules that come out of `torch.compile(module)`: the module inside, and compilation in place.
4. Conversion of a module's tensors that leaves complex ones alone.

**The optimizer's fast path.** torch opens and closes a record around `step` and `zero_grad`, with or without a
profiler: 38 of the 218 µs of a step of a tiny model. `stepper` and `clearer` return calls that do the same without the
record. They make the optimizer's own call if anything about the optimizer is not torch's own:

- Its `step` or `zero_grad` is not a function of `torch.optim`: a subclass overrides it, or somebody has replaced or
  wrapped it on the class.
- The object has a `step` or `zero_grad` of its own. The exception is the counter that a learning-rate scheduler puts
  around `step`, which only notes that a step was made.
- Hooks are registered, for this optimizer or for all.
- A profiler is running.

Each of these may change during training, so each call checks them again.

**The compiler.** `torch._dynamo` and what it needs are 800 modules. Their import takes as long as that of torch, and torch
does it when the first optimizer is made. It does so for two reasons:

- Four methods of `Optimizer`, one of `DistributedDataParallel` and one of `ExaminedStep` tell the compiler to pass over
  them. As long as nothing has imported the compiler, there is nothing to tell, and `delay_compiler` lets these methods run
  as they are.
- `Optimizer.step` tells the compiler to begin a new graph. The compiler never sees the steps of `stepper`, which leave
  that out.
"""

from __future__ import annotations

import functools
import importlib.abc
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW, Optimizer, lr_scheduler
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    _use_grad_for_differentiable,
)

from footplate.step.examined_step import ExaminedStep

_ZERO_GRAD = Optimizer.zero_grad
_LEAST_RATE = 1e-30
_IN_ITS_PLACE = "__dynamo_disable"  # torch/_compile.py
_OPTIM_FOLDER = str(Path(torch.optim.__file__).parent)
_NO_GRAD_FILE = torch.no_grad.__call__.__code__.co_filename

# The code of the function that torch puts around each class's `step`: it makes the record and calls the hooks.
_RECORDING = Optimizer.profile_hook_step(lambda: None).__code__  # pyright: ignore[reportFunctionMemberAccess]
# The code of the function between that and the class's own: it turns gradients off.
_SETTING_GRADIENTS = _use_grad_for_differentiable(lambda: None).__code__  # pyright: ignore[reportFunctionMemberAccess]


def stepper(optimizer: Optimizer) -> Callable[[], Any]:
    """A function to call instead of `optimizer.step`."""
    recorded: Any = type(optimizer).step
    if not is_torchs(recorded):
        return lambda: optimizer.step()

    bare = _without_new_graph(recorded.__wrapped__)
    attributes = vars(optimizer)
    # The attribute `step` that may be passed over: none, or the counter of a scheduler.
    trusted: Any = None

    def step() -> Any:
        nonlocal trusted
        if type(optimizer).step is not recorded or _has_hooks(optimizer) or _profiler_enabled():
            return optimizer.step()
        replaced = attributes.get("step")
        if replaced is not trusted:
            if not _counts_for_scheduler(replaced, recorded):
                return optimizer.step()
            note_step_for_scheduler(optimizer)
            trusted = replaced
        return bare(optimizer)

    return step


def _without_new_graph(step: Any) -> Callable[[Optimizer], Any]:
    """What the `step` of a class of torch does around its own code, except for the compiler."""
    if step.__code__ is not _SETTING_GRADIENTS:
        return step
    own = step.__wrapped__

    def without_new_graph(optimizer: Optimizer) -> Any:
        enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(optimizer.defaults["differentiable"])
        try:
            return own(optimizer)
        finally:
            torch.set_grad_enabled(enabled)

    return without_new_graph


def clearer(optimizer: Optimizer) -> Callable[[], Any]:
    """A function to call instead of `optimizer.zero_grad`."""
    attributes = vars(optimizer)

    def clear() -> None:
        if type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in attributes or _profiler_enabled():
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return clear


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return True if an optimizer's `step` is torch's own, without hooks. A scheduler may count its steps."""
    recorded: Any = type(optimizer).step
    own = vars(optimizer).get("step")
    own_is_torchs = own is None or _counts_for_scheduler(own, recorded)
    return is_torchs(recorded) and own_is_torchs and not _has_hooks(optimizer)


def tensor_rate(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """The learning rate of a group, for a step that reads rates from tensors.

    With tensors, Adam divides by its rate. At a rate of 0, such as the first one of many schedules, each weight whose
    gradients were all 0 would become NaN. So Adam gets a rate that is too small to change a weight.
    """
    rate = float(group["lr"])
    return _LEAST_RATE if rate == 0 and isinstance(optimizer, (Adam, AdamW)) else rate


def note_step_for_scheduler(optimizer: Any) -> None:
    """Note that a step was made, as the counter of a scheduler does around `optimizer.step`."""
    optimizer._opt_called = True


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


@functools.cache
def is_torchs(step: Any) -> bool:
    """Return True if the `step` of a class, and all that it wraps, are torch's code."""
    if getattr(step, "__code__", None) is not _RECORDING:
        return False
    function = step
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith((_OPTIM_FOLDER, _NO_GRAD_FILE)):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _counts_for_scheduler(step: Any, recorded: Any) -> bool:
    """Return True if a scheduler has put `step` around the class's own `step`, and around nothing else."""
    file = getattr(getattr(step, "__code__", None), "co_filename", "")
    return file == lr_scheduler.__file__ and getattr(step, "__wrapped__", None) is recorded


# torch.compile


def delay_compiler() -> None:
    """Let torch import its compiler when something is compiled, not when an optimizer is made."""
    if "torch._dynamo" not in sys.modules and not any(isinstance(finder, _CompilerImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CompilerImport())


class _CompilerImport(importlib.abc.MetaPathFinder):
    """Finds no module. The import system asks it for each, so it knows when the compiler is imported.

    torch keeps, beside a method that the compiler must pass over, what to call in its place. Until that import, it is the
    method itself.
    """

    def __init__(self) -> None:
        passed_over = (
            Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict,
            DistributedDataParallel._inside_ddp_forward, ExaminedStep.__torch_dispatch__,
        )  # fmt: skip
        self._methods = [inspect.unwrap(method) for method in passed_over]
        for method in self._methods:
            vars(method).setdefault(_IN_ITS_PLACE, method)

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "torch._dynamo":
            for method in self._methods:
                if vars(method).get(_IN_ITS_PLACE) is method:
                    del vars(method)[_IN_ITS_PLACE]


def inside(model: Any) -> Any:
    """The module that `torch.compile` has wrapped; any other object as it is."""
    # The first torch.compile imports this module. Without it, nothing can be compiled.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return model._orig_mod if dynamo is not None and isinstance(model, dynamo.OptimizedModule) else model


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if a module is compiled in place."""
    return module._compiled_call_impl is not None


def compile_in_place(module: torch.nn.Module, name: str, compiler: Callable[..., Any]) -> None:
    """Call `module.compile()`, also for classes of torch, whose frames the compiler would pass over.

    Args:
        module: the module.
        name: of its code. Modules of one name share what is compiled, if they are alike.
        compiler: `torch.compile`, with its options.
    """
    call = module._call_impl

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    compiled: Any = _Compiled(compiler(with_own_code(forward, name)))
    module._compiled_call_impl = compiled


_CODES: dict[str, CodeType] = {}
_numbers = itertools.count()


def with_own_code(function: FunctionType, name: str | None = None) -> Callable[..., Any]:
    """A copy of a function, for `torch.compile`.

    Functions of one `def` have one code object. `torch.compile` compiles it eight times at most, and then runs it eagerly.
    By its name and line, it also remembers which numbers and sizes have changed, and compiles for all values of these. The
    copy has a code object and a name of its own, or shares them with the copies of the same name.
    """
    own = name or f"{function.__name__} {next(_numbers)}"
    code = function.__code__.replace(co_name=own)
    if name is not None:
        code = _CODES.setdefault(name, code)
    copy = FunctionType(code, function.__globals__, own, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def inner_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The `step` of an optimizer of torch without the wrappers around it, which split what `torch.compile` makes of it.

    One of them makes a record for a profiler. The other one turns gradients off, which the caller must do.
    """
    return inspect.unwrap(type(optimizer).step)


def compile_graph(backend: str | Callable[..., Any], graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph of torch.compile by a backend, or by that of a name."""
    from torch._dynamo.backends.registry import lookup_backend

    return (lookup_backend(backend) if isinstance(backend, str) else backend)(graph, list(inputs))


def mark_static(tensor: torch.Tensor) -> None:
    """Let `torch.compile` compile for the sizes of a tensor, also if other tensors in its place had other sizes."""
    # What torch._dynamo.mark_static sets, without a call for each dimension.
    tensor._dynamo_static_indices = set(range(tensor.dim()))  # pyright: ignore[reportAttributeAccessIssue]


def cannot_be_compiled(error: Exception) -> bool:
    """Return True if an error says that a function can't be compiled as a whole, or not once more."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

    return isinstance(error, (FailOnRecompileLimitHit, Unsupported))


class _Compiled:
    """A compiled function of this process. Copies and pickles of its module leave it behind."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _not_compiled, ()


def _not_compiled() -> None:
    """The value of `_compiled_call_impl` of a module that isn't compiled."""


# Types


def convert_floating(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point parameters and buffers of a module.

    `Module.to(dtype)` would also convert complex tensors, and drop their imaginary part.
    """
    module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

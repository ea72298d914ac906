"""A rank's process, used for the next attempt: what is taken back in torch.

When a rank is lost, the other ranks raise in a collective. Their calls end as after any exception: the trainer has closed
its loaders, checkpoints, loggers and profiles. Then `TorchState.clean_up` brings torch back to the state before the call,
so that the next call in this process is as a first one. `launch/process_state.py` does the same for Python.

The process isn't used again if something of the call may go on to act: a process group to which something still refers,
or a hook that applies to all modules, optimizers or saved tensors.

What stays is the reason for all this: imported libraries, the memory that the process holds, and libraries of compiled
code. Functions from `torch.compile` are compiled again, with warm caches. Dynamo remembers shapes, and compiles
differently once it has seen several, so kept functions could differ in the last bit from those of the rank that is new.
"""

from __future__ import annotations

import gc
import re
import sys
import weakref
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _autograd, _len_torch_dispatch_stack, _len_torch_function_stack  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn.modules import module as torch_modules

from footplate.distributed import device_mesh, group
from footplate.step.optimizers import steps_by_closure
from footplate.step.torch_internals import is_torchs


class TorchState:
    """The global settings of torch. Make it before the call."""

    def __init__(self) -> None:
        self._rng = torch.get_rng_state()
        self._dtype = torch.get_default_dtype()
        self._threads = torch.get_num_threads()
        self._deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._fill_memory = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
        self._matmul_precision = torch.get_float32_matmul_precision()
        self._onednn = (torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic)
        self._autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._grad = torch.is_grad_enabled()
        self._anomalies = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        self._sharing = torch.multiprocessing.get_sharing_strategy()
        self._hooks = _hooks()

    def clean_up(self) -> str:
        """Bring torch back. Return "", or why this process must end, as the end of a sentence."""
        groups = [weakref.ref(member) for member in dist.distributed_c10d._world.pg_map]
        group.forget()
        device_mesh.forget_others()
        self._restore()
        _forget_compiled()
        for cached in (steps_by_closure, is_torchs):  # by the user's classes
            cached.cache_clear()
        gc.collect()
        if any(member() is not None for member in groups):
            return "something in the process still refers to a process group"
        if torch.cuda.is_initialized():
            return "it has used a GPU beside the trainer"
        if _hooks() != self._hooks:
            return "it has left a hook of torch for all modules, optimizers or operations"
        return ""

    def _restore(self) -> None:
        torch.set_rng_state(self._rng)
        torch.set_default_dtype(self._dtype)
        torch.set_num_threads(self._threads)
        enabled, warn_only = self._deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self._fill_memory  # pyright: ignore[reportAttributeAccessIssue]
        torch.set_float32_matmul_precision(self._matmul_precision)
        torch.backends.mkldnn.set_flags(*self._onednn)
        enabled, dtype = self._autocast
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
        torch.set_autocast_cache_enabled(self._autocast_cache)
        torch.clear_autocast_cache()
        torch.set_grad_enabled(self._grad)
        torch.autograd.set_detect_anomaly(*self._anomalies)
        torch.multiprocessing.set_sharing_strategy(self._sharing)


def _hooks() -> tuple[Any, ...]:
    """What applies to all modules, optimizers, operations or saved tensors of this process."""
    of_modules = _values(torch_modules, r"_global_.*_hooks")
    of_optimizers = _values(sys.modules["torch.optim.optimizer"], r"_global_optimizer_.*_hooks")
    saved_tensors = _autograd._top_saved_tensors_default_hooks(True)
    return (of_modules, of_optimizers, saved_tensors, _len_torch_function_stack(), _len_torch_dispatch_stack())


def _values(module: ModuleType, pattern: str) -> list[tuple[Any, ...]]:
    return [tuple(hooks) for name, hooks in vars(module).items() if re.fullmatch(pattern, name)]


def _forget_compiled() -> None:
    """Forget functions from `torch.compile`, and end the processes that compile."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    compiling = sys.modules.get("torch._inductor.async_compile")
    if compiling is not None:
        compiling.shutdown_compile_workers()

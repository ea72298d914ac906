"""DistributedOptimizer: an optimizer that reduces the gradients over all ranks before it steps.

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

The result is still an instance of the optimizer's class, with the same parameter groups and state, so learning-rate
schedulers and gradient scalers accept it. `gradients.py` reduces the gradients during the backward pass. With
op=Adasum, the changes that the ranks' steps make are combined instead.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from footplate.compat.horovod.compression import Compression
from footplate.compat.horovod.errors import MisuseError
from footplate.compat.horovod.gradients import GradientReducer, Reduction
from footplate.compat.horovod.submit import Adasum, Average, ReduceOp, synchronize
from footplate.compat.horovod.verbs import allreduce_async_
from footplate.compat.horovod.world import ProcessSet, global_process_set, size
from footplate.core.errors import ConfigError


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer so that it averages gradients over all ranks before it steps.

    Args:
        optimizer: a torch optimizer.
        named_parameters: `model.named_parameters()`; error texts use the names.
        compression: `Compression.none`, `Compression.fp16`, or a compressor of your own.
        backward_passes_per_step: the number of backward passes whose gradients are summed before they are reduced.
        op: Average, Sum, Min, Max, Product; with Adasum, the changes that a step makes are combined.
        gradient_predivide_factor: with Average, divides before the sum and multiplies after it.
        num_groups: the older name of an integer for `groups`.
        groups: the number of groups of parameters that are reduced together, or the groups; None chooses by size.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks whose gradients are reduced.

    Raises:
        ConfigError: arguments that contradict each other, or parameters without a name.

    Examples:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> for features, labels in train:
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.mse_loss(model(features).squeeze(1), labels).backward()
        ...     optimizer.step()
    """
    if isinstance(optimizer, _Methods | _AdasumMethods):
        raise ConfigError("DistributedOptimizer was given a DistributedOptimizer: wrap the plain optimizer, once.")
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}: expected 1 or more.")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ConfigError(f"gradient_predivide_factor={gradient_predivide_factor} goes with op=Average, not {op}.")
    named = _named(optimizer, named_parameters)
    if op == Adasum and size() > 1:
        return _adasum(optimizer, named, compression, backward_passes_per_step, process_set)

    reduction = Reduction(ReduceOp(op), compression, gradient_predivide_factor, sparse_as_dense, process_set)
    wrapped: Any = _as(_Methods, optimizer)
    wrapped._reducer = None
    wrapped._synchronized, wrapped._synchronizes = False, True
    chosen = _groups(named, num_groups or None if groups is None else groups)
    if process_set.included() and size() > 1:
        wrapped._reducer = GradientReducer(named, chosen, reduction, backward_passes_per_step)
    return wrapped


class _Methods:
    """The methods of a distributed optimizer; this class comes before the optimizer's own."""

    param_groups: list[dict[str, Any]]
    _reducer: GradientReducer | None
    _synchronized: bool
    _synchronizes: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, then step. The gradients of a closure are reduced after each call of the closure."""
        if closure is not None:
            return super().step(lambda: self._evaluated(closure))  # type: ignore[misc]
        if self._synchronizes:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): "
                    "gradients are reduced twice. Put the step into `with optimizer.skip_synchronize():`.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step()  # type: ignore[misc]

    def synchronize(self) -> None:
        """Reduce the gradients now, to clip them, say. Then step within `skip_synchronize`."""
        if self._reducer is not None:
            # Parameters may have been added or unfrozen since the last step.
            parameters = (parameter for group in self.param_groups for parameter in group["params"])
            reducer = self._reducer
            reducer.adopt(
                [parameter for parameter in parameters if parameter.requires_grad and not reducer.knows(parameter)]
            )
            self._reducer.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use the gradients as they are, within this context."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Don't call it between `backward` and `step`.

        Raises:
            MisuseError: some gradients have not been reduced.
        """
        if self._reducer is not None and self._reducer.begun:
            raise MisuseError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): gradients are being reduced. Call it before backward() or after step()."
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._reducer is not None:
            self._reducer.forget()
        self._synchronized, self._synchronizes = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes before gradients are reduced."""
        if self._reducer is not None:
            self._reducer.passes = passes
            self._reducer.forget()

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        self._synchronized = False
        return loss


class _AdasumMethods:
    """The methods of an optimizer with op=Adasum: each rank steps on its own gradients, and the changes are combined.

    Adasum compares directions, and the step of an optimizer such as Adam has another direction than the gradient. So the
    parameters are copied, the optimizer steps, and the change of each parameter is combined.
    """

    _named: list[tuple[str, nn.Parameter]]
    _compression: Any

    def _begin(self, named: Sequence[tuple[str, nn.Parameter]], compression: Any, passes: int) -> None:
        # Nothing is sent before the step, so the number of backward passes before it doesn't matter.
        self._named = list(named)
        self._compression = compression

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and combine the changes of all ranks."""
        before = [parameter.detach().clone() for _, parameter in self._named]
        loss = super().step(closure)  # type: ignore[misc]
        waits = []
        for (name, parameter), start in zip(self._named, before, strict=True):
            compressed, ctx = self._compression.compress(parameter.detach() - start)
            waits.append((parameter, start, allreduce_async_(compressed, name=f"change.{name}", op=Adasum), ctx))
        for parameter, start, handle, ctx in waits:
            parameter.copy_(start + self._compression.decompress(synchronize(handle), ctx))
        return loss

    def synchronize(self) -> None:
        """Do nothing: each rank keeps its own gradients."""

    def skip_synchronize(self) -> NoReturn:
        """Not supported with Adasum.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            "skip_synchronize() can't be used with op=Adasum, which combines the changes of a step. Leave it out."
        )


def _as(methods: type, optimizer: torch.optim.Optimizer) -> Any:
    """Make an optimizer with the same groups and state, whose class has `methods` before the optimizer's own."""
    kind = type(optimizer)
    wrapped = object.__new__(type(kind.__name__, (methods, kind), {"__module__": __name__}))
    # A learning-rate scheduler stores a wrapped `step` of the old object among its attributes.
    wrapped.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return wrapped


def _adasum(optimizer: Any, named: Any, compression: Any, passes: int, process_set: ProcessSet) -> Any:
    if process_set is not global_process_set:
        raise ConfigError("op=Adasum: supported over all ranks only, not in a process set.")
    if size() & (size() - 1):
        raise ConfigError(f"op=Adasum: needs a number of ranks that is a power of two; there are {size()}.")
    wrapped: Any = _as(_AdasumMethods, optimizer)
    wrapped._begin(named, compression, passes)
    return wrapped


def _named(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters with their names, checked."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [(f"noname.{index}", parameter) for index, parameter in enumerate(parameters)]

    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ConfigError(
            "named_parameters: expected pairs of name and parameter, as model.named_parameters() gives them."
        )

    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"named_parameters: each name may be there once; repeated: {', '.join(twice)}.")
    ids = {id(parameter) for parameter in parameters}
    missing = ids - {id(parameter) for _, parameter in named}
    if missing:
        raise ConfigError(
            f"named_parameters: {len(missing)} of the optimizer's {len(ids)} parameters have no name. Give "
            "model.named_parameters() of the whole model, or leave the argument out."
        )
    return [(name, parameter) for name, parameter in named if id(parameter) in ids]


def _groups(named: Any, groups: int | Sequence[Sequence[nn.Parameter]] | None) -> list[list[nn.Parameter]] | None:
    if groups is None:
        return None
    parameters = [parameter for _, parameter in named if parameter.requires_grad]
    if isinstance(groups, int):
        if groups < 1:
            raise ConfigError(f"groups={groups}: expected 1 or more, or lists of parameters.")
        count = min(groups, len(parameters))
        ends = [len(parameters) * index // count for index in range(count + 1)]
        return [_checked_group(parameters[start:end]) for start, end in itertools.pairwise(ends)]
    flat = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, Tensor) for parameter in flat):
        raise ConfigError("groups: expected a number, or lists of parameters.")
    if len({id(parameter) for parameter in flat}) < len(flat):
        raise ConfigError("groups: a parameter may be in one group only.")
    return [_checked_group(group) for group in groups]


def _checked_group(group: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    if len({(parameter.dtype, parameter.device) for parameter in group}) > 1:
        raise ConfigError(
            "groups: the parameters of a group must have one type and device, because they are reduced as one tensor."
        )
    return list(group)

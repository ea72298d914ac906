"""Elastic training: a function that is called again from the last commit after a failure.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for state.batch in range(state.batch, batches):
                ...
                state.commit()
            state.batch = 0

    train(hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0))

A collective that fails on one rank fails on every rank. What happens next depends on the failure:

    all processes live     the ranks restore the last commit, reconnect, and call the function again
    a process has ended    the other processes end too; the launcher starts all ranks again, perhaps fewer, and these load
                           the last commit
    the ranks disagree     (`MismatchError`) the error is raised, because a retry would fail in the same way

In the first two cases, reset callbacks run, the state is sent from rank 0 to all ranks, and the function begins.

Under a launcher, the first rank of each machine writes every commit into the directory that the machine keeps for the
launch. The newest commit of all machines is loaded.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from footplate.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, MismatchError, PeerLostError
from footplate.compat.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from footplate.compat.horovod.sampler import ElasticSampler
from footplate.compat.horovod.world import init, local_rank, rank, shutdown
from footplate.launch import worker

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

_FILE = "horovod-commit.pt"


class State:
    """A state that is equal on all ranks and survives a failure. A subclass saves, restores and sends it.

    Examples:
        >>> class Counter(hvd.elastic.State):
        ...     value = saved_value = 0
        ...
        ...     def save(self):
        ...         self.saved_value = self.value
        ...
        ...     def restore(self):
        ...         self.value = self.saved_value
        ...
        ...     def sync(self):
        ...         self.value = hvd.broadcast_object(self.value)
        >>> counter = Counter()
        >>> counter.value = 5
        >>> counter.commit()
        >>> counter.value = 6
        >>> counter.restore()
        >>> counter.value
        5
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = rank
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call after the ranks have reconnected, to adapt a learning rate to their number, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Run `reset` and the reset callbacks, after the ranks have reconnected."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state in memory and, under a launcher, for the next attempt. All ranks call it at the same place."""
        self.save()
        self._commits += 1
        directory = worker.kept()
        if directory is not None and local_rank() == 0:
            _write(directory / _FILE, (self._commits, self.saved()))
            worker.saved()
        worker.progressed()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: the launcher ends the attempt if a host joins, leaves or is lost. The next one has the others."""

    def recover(self) -> None:
        """Load the newest commit of any machine, in a later attempt of a launch. All ranks call it."""
        directory = worker.kept()
        if directory is None or worker.attempt() == 0:
            return

        # Each file holds the number of its commit and the saved state.
        commit = _read(directory / _FILE) if local_rank() == 0 else None
        commits = allgather_object(-1 if commit is None else commit[0], name="elastic.recover")
        newest = max(commits)
        if newest >= 0:
            self._commits, saved = broadcast_object(commit, commits.index(newest), name="elastic.recover")
            self.load_saved(saved)
        self.on_reset()

    def forget(self) -> None:
        """Delete the saved commit, because the work is done."""
        directory = worker.kept()
        if directory is not None and local_rank() == 0:
            (directory / _FILE).unlink(missing_ok=True)

    def save(self) -> None:
        """Copy the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send the state of rank 0 to all ranks."""
        raise NotImplementedError

    def saved(self) -> Any:
        """Return the copy, to be pickled for the next attempt; None saves nothing."""
        return None

    def load_saved(self, saved: Any) -> None:
        """Restore a copy that `saved` has returned."""

    def reset(self) -> None:
        """Called after the ranks have reconnected, before the reset callbacks."""


class ObjectState(State):
    """A state of Python objects, which are attributes; `kwargs` are their first values.

    Examples:
        >>> state = hvd.elastic.ObjectState(epoch=0)
        >>> state.epoch = 1
        >>> state.restore()  # to the last commit
        >>> state.epoch
        0
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = rank, **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set(kwargs)

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set(self._saved_state)

    def sync(self) -> None:
        if self._saved_state:
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            self._set(self._saved_state)

    def saved(self) -> Any:
        return self._saved_state

    def load_saved(self, saved: Any) -> None:
        self._saved_state = {**self._saved_state, **saved}
        self.restore()

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """A state of models, optimizers and `ElasticSampler`s, by their state dicts, and of other Python objects.

    Args:
        model: `state.model`; None for no model.
        optimizer: `state.optimizer`; None for no optimizer.
        kwargs: more objects of each kind, by name.

    Examples:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = hvd.elastic.TorchState(model, optimizer, epoch=0)
        >>> state.epoch = 1
        >>> state.commit()
    """

    _keepers: dict[str, _Keeper]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        keepers = {name: _keeper(value) for name, value in values.items() if isinstance(value, tuple(_KEEPERS))}
        object.__setattr__(self, "_keepers", keepers)
        for name, keeper in keepers.items():
            object.__setattr__(self, name, keeper.value)
        super().__init__(**{name: value for name, value in values.items() if name not in keepers})

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._keepers:
            self._keepers[name] = _keeper(value)

    def save(self) -> None:
        for keeper in self._keepers.values():
            keeper.save()
        super().save()

    def restore(self) -> None:
        for keeper in self._keepers.values():
            keeper.restore()
        super().restore()

    def sync(self) -> None:
        for keeper in self._keepers.values():
            keeper.sync()
            keeper.save()
        super().sync()

    def saved(self) -> Any:
        return {"objects": super().saved(), "states": {name: keeper.copy for name, keeper in self._keepers.items()}}

    def load_saved(self, saved: Any) -> None:
        for name, state in saved["states"].items():
            self._keepers[name].copy = state
        super().load_saved(saved["objects"])


class _Keeper:
    """A value with a `state_dict`, and a copy of its state."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self.copy = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self.copy)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class _Model(_Keeper):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), 0)


class _Optimizer(_Keeper):
    def restore(self) -> None:
        # An optimizer uses the tensors of a loaded state as its own, and would change the copy.
        self.value.load_state_dict(copy.deepcopy(self.copy))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, 0)


_KEEPERS = {torch.nn.Module: _Model, torch.optim.Optimizer: _Optimizer, ElasticSampler: _Keeper}


def _keeper(value: Any) -> _Keeper:
    return next(keeper(value) for kind, keeper in _KEEPERS.items() if isinstance(value, kind))


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that takes a state: it is called with the same state on all ranks, and again after a failure.

    Raises:
        PeerLostError: a process has ended; the launcher then starts all ranks again.
        MismatchError: the ranks disagree about an operation.

    Examples:
        >>> @hvd.elastic.run
        ... def count(state):
        ...     for state.epoch in range(state.epoch, 3):
        ...         state.commit()
        ...     return state.epoch
        >>> count(hvd.elastic.ObjectState(epoch=0))
        2
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        state.recover()
        is_synced = False
        while True:
            try:
                if not is_synced:
                    state.sync()
                result = function(state, *args, **kwargs)
            except (PeerLostError, MismatchError):
                raise
            except HorovodInternalError:
                state.restore()
                is_synced = False
            except HostsUpdatedInterrupt as interrupt:
                is_synced = interrupt.skip_sync
            else:
                state.forget()
                return result
            shutdown()
            init()
            state.on_reset()

    return wrapper


def _write(path: Path, value: Any) -> None:
    """Write a file so that a killed process leaves it complete or not written at all."""
    partial = path.with_suffix(f".{os.getpid()}")
    torch.save(value, partial, pickle_module=cloudpickle)
    partial.replace(path)


def _read(path: Path) -> Any:
    # This can run code. Only this user can write into the directory.
    return torch.load(path, map_location="cpu", weights_only=False) if path.exists() else None

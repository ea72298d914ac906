"""Horovod's elastic training: a state that is committed, and a function that begins again from the last commit.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for state.batch in range(state.batch, batches):
                ...
                state.commit()
            state.batch = 0

    train(hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0))

A collective fails on every rank when it fails on one. What then happens depends on why:

    all processes live     they go back to the last commit, meet again, and call the function again
    a process has ended    the others end too; the launch starts all ranks anew, perhaps fewer, and these take up the last
                           commit: in a launch, the first rank of each machine writes every commit into the directory that
                           the machine keeps for the launch, and the newest one of all machines counts
    the ranks disagree     (`MismatchError`) the error is raised: trying again would end the same

After each of the first two, reset callbacks run, the state is sent from rank 0 to all, and the function begins.
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
    """What must be equal on all ranks, and survive a failure: subclasses say how it is saved, restored and sent."""

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = rank
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Functions to be called when the ranks have met again, to adapt a learning rate to their number, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when the ranks have met again."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, here and, in a launch, for the next attempt. All ranks call it at the same place."""
        self.save()
        self._commits += 1
        directory = worker.kept()
        if directory is not None and local_rank() == 0:
            _write(directory / _FILE, (self._commits, self.saved()))
        worker.progressed()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Does nothing: a launch has no hosts that come and go unasked, and ends the attempt when one is lost."""

    def recover(self) -> None:
        """In a later attempt of a launch: take up the newest commit that any machine has; all ranks call it."""
        directory = worker.kept()
        if directory is None or worker.attempt() == 0:
            return
        found = _read(directory / _FILE) if local_rank() == 0 else None
        commits = allgather_object(-1 if found is None else found[0], name="elastic.recover")
        newest = max(commits)
        if newest >= 0:
            self._commits, saved = broadcast_object(found, commits.index(newest), name="elastic.recover")
            self.load_saved(saved)
        self.on_reset()

    def forget(self) -> None:
        """The work is done: no attempt is to continue it."""
        directory = worker.kept()
        if directory is not None and local_rank() == 0:
            (directory / _FILE).unlink(missing_ok=True)

    def save(self) -> None:
        """Copy the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state that of rank 0, on all ranks."""
        raise NotImplementedError

    def saved(self) -> Any:
        """The copy, to be pickled for the next attempt; None keeps nothing."""
        return None

    def load_saved(self, saved: Any) -> None:
        """Go back to what `saved` has given."""

    def reset(self) -> None:
        """Called when the ranks have met again, before the callbacks."""


class ObjectState(State):
    """Python objects as attributes; `kwargs` are their first values."""

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
    """Models, optimizers and `ElasticSampler`s by their own means, other objects as `ObjectState` has them.

    Args:
        model: `state.model`, if given.
        optimizer: `state.optimizer`, if given.
        kwargs: more of each kind, by name.
    """

    _keepers: dict[str, _Keeper]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        kept = {name: _keeper(value) for name, value in given.items() if isinstance(value, tuple(_KEEPERS))}
        object.__setattr__(self, "_keepers", kept)
        for name, keeper in kept.items():
            object.__setattr__(self, name, keeper.value)
        super().__init__(**{name: value for name, value in given.items() if name not in kept})

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
    """A value with a `state_dict`, and a copy of that."""

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
        # An optimizer takes the tensors that it is given as its own.
        self.value.load_state_dict(copy.deepcopy(self.copy))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, 0)


_KEEPERS = {torch.nn.Module: _Model, torch.optim.Optimizer: _Optimizer, ElasticSampler: _Keeper}


def _keeper(value: Any) -> _Keeper:
    return next(keeper(value) for kind, keeper in _KEEPERS.items() if isinstance(value, kind))


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: `function(state, …)` is called with a state that is equal on all ranks, and again after a failure.

    Raises:
        PeerLostError: a process has ended; a launch then starts all ranks anew.
        MismatchError: the ranks don't ask for the same.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        state.recover()
        in_step = False
        while True:
            try:
                if not in_step:
                    state.sync()
                result = function(state, *args, **kwargs)
            except (PeerLostError, MismatchError):
                raise
            except HorovodInternalError:
                state.restore()
                in_step = False
            except HostsUpdatedInterrupt as interrupt:
                in_step = interrupt.skip_sync
            else:
                state.forget()
                return result
            shutdown()
            init()
            state.on_reset()

    return wrapper


def _write(path: Path, value: Any) -> None:
    """Whole or not at all, as far as a process that is killed goes."""
    partial = path.with_suffix(f".{os.getpid()}")
    torch.save(value, partial, pickle_module=cloudpickle)
    partial.replace(path)


def _read(path: Path) -> Any:
    # Code may be run by this. The directory is this user's alone, and so is what lies in it.
    return torch.load(path, map_location="cpu", weights_only=False) if path.exists() else None

"""The exceptions of Horovod's verbs."""

from __future__ import annotations

from footplate.core.errors import ConfigError, FootplateError


class HorovodInternalError(RuntimeError):
    """A collective operation failed. `elastic.run` restores the last commit and calls the function again.

    Examples:
        >>> try:
        ...     hvd.allreduce(torch.ones(2))
        ... except hvd.HorovodInternalError:
        ...     print("a rank has failed")
        tensor([1., 1.])
    """


class PeerLostError(HorovodInternalError, ConnectionError):
    """The process of another rank has ended. Only a launcher can start a process in its place.

    Examples:
        >>> issubclass(hvd.PeerLostError, hvd.HorovodInternalError)
        True
    """


class MismatchError(FootplateError, HorovodInternalError):
    """The ranks disagree about an operation: its name, shapes, types or root. A retry would fail in the same way.

    Examples:
        >>> try:
        ...     hvd.allreduce(torch.ones(hvd.rank() + 1))  # fails with several ranks: their shapes differ
        ... except hvd.MismatchError as error:
        ...     print(error)
        tensor([1.])
    """


class MisuseError(FootplateError, AssertionError):
    """The methods of a `DistributedOptimizer` were called in an order that would train on unreduced gradients.

    Examples:
        >>> issubclass(hvd.MisuseError, fp.FootplateError)
        True
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Raise it in a function under `elastic.run` to reconnect all ranks without restoring the last commit.

    Attributes:
        skip_sync: True if the state is equal on all ranks, so that it isn't sent from rank 0.

    Examples:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     state.calls += 1
        ...     if state.calls == 1:
        ...         raise hvd.HostsUpdatedInterrupt(skip_sync=True)
        ...     return state.calls
        >>> train(hvd.elastic.ObjectState(calls=0))
        2
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts have changed")
        self.skip_sync = skip_sync


def not_initialised() -> ConfigError:
    """The error of a verb that is called before `init`."""
    return ConfigError("Horovod has not been initialized: call hvd.init() first.")

"""The exceptions of Horovod's verbs."""

from __future__ import annotations

from footplate.core.errors import ConfigError, FootplateError


class HorovodInternalError(RuntimeError):
    """A collective operation failed. `elastic.run` restores the last commit and calls the function again."""


class PeerLostError(HorovodInternalError, ConnectionError):
    """The process of another rank has ended. Only a launcher can start a process in its place."""


class MismatchError(FootplateError, HorovodInternalError):
    """The ranks disagree about an operation: its name, shapes, types or root. A retry would fail in the same way."""


class MisuseError(FootplateError, AssertionError):
    """The methods of a `DistributedOptimizer` were called in an order that would train on unreduced gradients."""


class HostsUpdatedInterrupt(RuntimeError):
    """Raise it in a function under `elastic.run` to reconnect all ranks without restoring the last commit.

    Attributes:
        skip_sync: True if the state is equal on all ranks, so that it isn't sent from rank 0.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts have changed")
        self.skip_sync = skip_sync


def not_initialised() -> ConfigError:
    """The error of a verb that is called before `init`."""
    return ConfigError("Horovod has not been initialized: call hvd.init() first.")

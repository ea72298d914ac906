"""What Horovod's verbs raise."""

from __future__ import annotations

from footplate.core.errors import ConfigError, FootplateError


class HorovodInternalError(RuntimeError):
    """A collective operation failed; `elastic.run` goes back to the last commit and begins anew."""


class PeerLostError(HorovodInternalError):
    """The process of another rank is no more. Meeting again needs a process in its place, which a launcher starts."""


class MismatchError(FootplateError, HorovodInternalError):
    """The ranks don't ask for the same: other names, shapes, types or roots. Trying again doesn't mend it."""


class MisuseError(FootplateError, AssertionError):
    """Methods of a `DistributedOptimizer` called in an order that would train on unreduced gradients."""


class HostsUpdatedInterrupt(RuntimeError):
    """Raise it in a function under `elastic.run` to let all ranks meet again without going back to the last commit.

    Attributes:
        skip_sync: whether the state is known to be equal on all ranks.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts have changed")
        self.skip_sync = skip_sync


def not_initialised() -> ConfigError:
    """For whoever calls a verb before `init`."""
    return ConfigError("Horovod has not been initialized: call hvd.init() first.")

"""HorovodRunner, as Databricks had it: a training function in `np` processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from footplate.errors import ConfigError


class HorovodRunner:
    """Runs a function as Horovod's ranks, over `footplate.Runner`.

    Args:
        np: -4 for four processes on this machine, 4 for four workers of the cluster, 0 for all that it has room for.
        driver_log_verbosity: "all" shows what every rank writes, "log_callback_only" what rank 0 writes.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        self.np = np
        self.driver_log_verbosity = driver_log_verbosity

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` on every rank; what it returns on rank 0.

        Raises:
            ConfigError: a number that can't be.
            LaunchError: `main` can't be sent, or a rank was lost and no restart is left.
        """
        from footplate.launch import launch

        if self.np >= 0:
            raise ConfigError(f"HorovodRunner(np={self.np}): there is no cluster here. Use np=-N for N processes.")
        return launch(functools.partial(main, **kwargs), world_size=-self.np, name="HorovodRunner")

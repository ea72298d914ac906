"""HorovodRunner, as Databricks had it: a training function in `np` processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from footplate.launch.runner import Runner


class HorovodRunner:
    """Runs a function as Horovod's ranks, over `footplate.Runner`, which has more to set.

    Args:
        np: -4 for four processes on this machine, 4 for four workers of the cluster, 0 for all that it has room for.
        driver_log_verbosity: `"all"` shows what every rank writes; `"log_callback_only"` only what they give to
            `footplate.launch.worker.log_to_driver`.

    Raises:
        ConfigError: a number or a word that can't be.
    """

    def __init__(
        self, *, np: int, driver_log_verbosity: Literal["all", "log_callback_only"] = "log_callback_only"
    ) -> None:
        self._runner = Runner(np, driver_log_verbosity=driver_log_verbosity)

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` on every rank; what it returns on rank 0.

        Raises:
            ConfigError: there is no cluster for a positive `np`.
            LaunchError: `main` can't be sent, or a rank was lost and no restart is left.
            Exception: what `main` raised.
        """
        return self._runner.run(main, **kwargs)

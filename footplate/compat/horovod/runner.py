"""HorovodRunner with Databricks' interface: runs a training function in `np` processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from footplate.launch.runner import Runner


class HorovodRunner:
    """Runs a function as Horovod's ranks. `footplate.Runner`, which it uses, has more settings.

    Args:
        np: -4 for four processes on this machine, 4 for four workers of the cluster, 0 for all workers that fit.
        driver_log_verbosity: `"all"` shows the output of every rank; `"log_callback_only"` shows only the messages of
            `footplate.launch.worker.log_to_driver`.

    Raises:
        ConfigError: a number or a word that is not possible.

    Examples:
        >>> def rank_and_size(greeting):
        ...     import footplate.compat.horovod as hvd
        ...
        ...     hvd.init()
        ...     return f"{greeting} {hvd.rank()} of {hvd.size()}"
        >>> hvd.HorovodRunner(np=-2).run(rank_and_size, greeting="rank")
        'rank 0 of 2'
    """

    def __init__(
        self, *, np: int, driver_log_verbosity: Literal["all", "log_callback_only"] = "log_callback_only"
    ) -> None:
        self._runner = Runner(np, driver_log_verbosity=driver_log_verbosity)

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` on every rank. Return the result of rank 0.

        Raises:
            ConfigError: there is no cluster for a positive `np`.
            LaunchError: `main` can't be pickled, or a rank was lost and no restart is left.
            Exception: the exception that `main` raised.
        """
        return self._runner.run(main, **kwargs)

"""`Runner`: the same training function on one process, on the devices of this machine, or on a cluster.

    Runner(np=-4).run(train, lr=1e-3)                    four processes of this machine
    Runner(np=8, backend="ray").run(train, lr=1e-3)      eight workers of a cluster

`choose` turns the number into a backend and a world size. `launch` does the rest.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, get_args

from footplate.core.errors import ConfigError, LaunchError, did_you_mean
from footplate.launch import backends, worker
from footplate.launch.backends import Backend, Local
from footplate.launch.output import Show
from footplate.launch.pickling import name_of
from footplate.launch.policy import Restarts
from footplate.launch.supervisor import launch

log = logging.getLogger(__name__)

# The backends whose machines come and go.
CLUSTERS = ("ray", "spark")


class Runner:
    """Runs a function in several processes, here or on a cluster, and returns the result of rank 0.

    Args:
        np: how many processes. Negative: that many on this machine. Positive: that many on the cluster; 1 runs on this
            machine if there is no cluster. 0: as many as the cluster, or else this machine, has slots.
        backend: `"local"`, `"ray"`, `"spark"`, or an object of your own; None for the cluster that this process is
            connected to: a Ray that is initialised or that `RAY_ADDRESS` names, or an active Spark session. With `"local"`,
            a positive `np` means processes of this machine, too.
        resources: what each worker needs, as arguments of the backend.
        max_restarts: how many failures are followed by another attempt; losses of a machine don't count.
        max_host_restarts: how many losses of a machine are followed by another attempt.
        env: variables for the processes, over those of their machines.
        log_dir: the directory in which each run gets one of its own for the whole output, `attempt-0/rank-0.log` and so on.
            None for the system's temporary directory; there, only the logs of failed runs outlast this object.
        driver_log_verbosity: the lines to show here while it runs: of `"all"` ranks, each with its rank; of `"rank_0"`; or
            with `"log_callback_only"` only the messages of `footplate.launch.worker.log_to_driver`.
        heartbeat_timeout: seconds of silence after which a process counts as frozen.
        tls: whether the connections of this launch to other machines are encrypted (`pip install "footplate[tls]"`). The
            ranks' own connections, over which gradients go, are not.
        min_np: the fewest processes that are enough on a Ray or Spark cluster. The run goes on without a lost machine, and
            with it again after the next checkpoint when it is back. None to wait for all.

    Attributes:
        log_dir: the directory of the latest run's output. In the temporary directory, that of a successful run lasts until
            the next run.

    Raises:
        ConfigError: an argument is invalid, or two don't go together.

    Examples:
        >>> def rank():
        ...     import os
        ...     return os.environ["RANK"], os.environ["WORLD_SIZE"]
        >>> fp.Runner(np=-2).run(rank)  # two processes of this machine; the result is that of rank 0
        ('0', '2')
    """

    def __init__(
        self,
        np: int,
        *,
        backend: str | Backend | None = None,
        resources: Mapping[str, Any] | None = None,
        max_restarts: int = 3,
        max_host_restarts: int = 10,
        env: Mapping[str, str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        driver_log_verbosity: Show = "all",
        heartbeat_timeout: float = 30.0,
        tls: bool = False,
        min_np: int | None = None,
    ) -> None:
        restarts = Restarts(max_restarts, max_host_restarts)
        check(np, backend, resources, restarts, heartbeat_timeout, tls, min_np)
        if driver_log_verbosity not in get_args(Show):
            raise ConfigError(
                f"driver_log_verbosity={driver_log_verbosity!r}: {did_you_mean(driver_log_verbosity, get_args(Show))}"
            )
        self.np = np
        self.log_dir: Path | None = None
        self._backend = backend
        self._resources = resources
        self._restarts = restarts
        self._env = {name: str(value) for name, value in (env or {}).items()}
        self._logs = log_dir
        self._show: Show = driver_log_verbosity
        self._heartbeat_timeout = heartbeat_timeout
        self._tls = tls
        self._min_np = min_np
        self._temporary_logs: list[Path] = []
        weakref.finalize(self, _remove_logs, self._temporary_logs, os.getpid())

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn(*args, **kwargs)` in each process, again after failures; return the result of rank 0.

        cloudpickle sends the function, so it may be of a notebook, of a script, or of a module.

        Raises:
            ConfigError: there is no cluster for a positive `np`.
            MissingExtra: the cluster's engine is not installed.
            LaunchError: see `footplate.launch.launch`; or this process is itself one of several.
            SystemExit: with 143, after SIGTERM to this process.
            KeyboardInterrupt: after Ctrl-C, when all processes have ended; a second one kills them at once.
            Exception: the exception that `fn` raised, with the worker's traceback in its notes, when no restart is left.
        """
        refuse_inside(f"Runner(np={self.np})")
        backend, world_size = choose(self.np, self._backend, self._resources, self._tls, self._min_np)
        name = name_of(fn)
        _remove_logs(self._temporary_logs, os.getpid())
        self.log_dir = new_log_dir(self._logs, name)
        log.info("%s: %d process(es), %s; whole logs: %s", name, world_size, backend.name, self.log_dir)
        try:
            result = launch(
                functools.partial(fn, **kwargs) if kwargs else fn, *args,
                world_size=world_size,
                backend=backend,
                restarts=self._restarts,
                env=self._env,
                name=name,
                log_dir=self.log_dir,
                show=self._show,
                heartbeat_timeout_s=self._heartbeat_timeout,
            )  # fmt: skip
        except Exception as error:
            if any(self.log_dir.glob("*/*")):
                error.add_note(f"Whole logs of all attempts: {self.log_dir}")
            raise
        if self._logs is None:
            self._temporary_logs.append(self.log_dir)
        return result


def check(
    np: Any,
    backend: Any,
    resources: Any,
    restarts: Restarts,
    heartbeat_timeout: Any,
    tls: Any = False,
    min_np: Any = None,
) -> None:
    """Check the arguments of a `Runner`.

    Raises:
        ConfigError: one is invalid, or two don't go together.
    """
    _check_numbers(np, restarts, heartbeat_timeout)
    _check_names(np, backend, resources)
    if min_np is not None and not (type(min_np) is int and 1 <= min_np <= (np or min_np)):
        raise ConfigError(f"min_np={min_np!r} with np={np}: expected a number from 1 to np, on a cluster.")
    if tls and np < 0:
        raise ConfigError(f"np={np} with tls={tls!r}: {backends.TLS_ALONE}")


def choose(
    np: int,
    backend: str | Backend | None = None,
    resources: Mapping[str, Any] | None = None,
    tls: bool = False,
    min_np: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Backend, int]:
    """Choose the backend for `np` processes, and the size of the world.

    Raises:
        ConfigError: there is no cluster, or TLS has no other machine.
        MissingExtra: the engine of the backend is not installed.
        LaunchError: its cluster can't be reached, or has no slots.
    """
    if np < 0:
        return Local(), -np
    name = backend or backends.connected_cluster(environ) or ("local" if np <= 1 else None)
    if name is None:
        raise ConfigError(
            f"np={np}: positive means workers of a cluster, and this process is connected to none: no Ray is initialised, "
            f"RAY_ADDRESS is not set, and there is no active Spark session. For {np} processes of this machine use "
            f'np=-{np} or backend="local"; for a cluster connect first (ray.init(), SparkSession.builder), or name it with '
            'backend="ray".'
        )
    if tls and not isinstance(name, str):
        raise ConfigError(
            f"tls={tls!r} with backend={name!r}: give tls to that backend, as in Cluster(placement, tls=True)."
        )
    if min_np is not None:
        if name not in CLUSTERS:
            raise ConfigError(
                f"min_np={min_np}: only the machines of {' and '.join(CLUSTERS)} come and go. Leave it out."
            )
        resources = {**(resources or {}), "min_workers": min_np}
    chosen = backends.named(name, resources, tls) if isinstance(name, str) else name
    size = np or chosen.slots()
    if size < 1:
        raise LaunchError(f"np=0: {chosen.name} has no free slot for a worker now. Add machines, or wait for them.")
    return chosen, size


def refuse_inside(caller: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to launch from a rank, as each rank would launch.

    Raises:
        LaunchError: this process is a worker, or one of torchrun's.
    """
    size = environ.get("WORLD_SIZE", "1")
    if worker.inside() or size not in ("", "1"):
        raise LaunchError(
            f"{caller} in rank {environ.get('RANK', 0)} of {size}: each rank would start processes of its own. Launch from "
            "outside; in a rank, call the function itself, or use a Trainer, which finds the other ranks."
        )


def new_log_dir(parent: str | os.PathLike[str] | None, name: str) -> Path:
    """Make a directory for the logs of a run: `PARENT/name-1`, `-2`, …; with None, a temporary one.

    Raises:
        ConfigError: it can't be made.
    """
    safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in name)
    if parent is None:
        return Path(tempfile.mkdtemp(prefix=f"footplate-{safe}-"))
    for number in count(1):
        directory = Path(parent) / f"{safe}-{number}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"log_dir={str(parent)!r}: can't make a directory there: {error}.") from error
        return directory.absolute()
    raise AssertionError("unreachable")


def _remove_logs(logs: list[Path], owner: int) -> None:
    """Remove directories of logs, unless this process was forked from the one that owns them."""
    while logs and os.getpid() == owner:
        shutil.rmtree(logs.pop(), ignore_errors=True)


def _check_numbers(np: Any, restarts: Restarts, heartbeat_timeout: Any) -> None:
    if not isinstance(np, int) or isinstance(np, bool):
        raise ConfigError(
            f"np={np!r}: expected a whole number: -4 for four processes of this machine, 8 for eight workers of a cluster."
        )
    for name in ("max_restarts", "max_host_restarts"):
        times: Any = getattr(restarts, name)
        if not isinstance(times, int) or isinstance(times, bool) or times < 0:
            raise ConfigError(f"{name}={times!r}: expected a whole number, 0 or more.")
    if not isinstance(heartbeat_timeout, (int, float)) or not heartbeat_timeout > 0:
        raise ConfigError(f"heartbeat_timeout={heartbeat_timeout!r}: expected seconds, more than 0.")


def _check_names(np: int, backend: Any, resources: Any) -> None:
    if isinstance(backend, str) and backend not in backends.NAMES:
        raise ConfigError(f'backend="{backend}": there is no such backend. {did_you_mean(backend, backends.NAMES)}')
    if backend is not None and not isinstance(backend, str) and not hasattr(backend, "worker_group"):
        raise ConfigError(f"backend={backend!r}: expected a name or a Backend. {did_you_mean('', backends.NAMES)}")
    if np >= 0:
        return
    if backend not in (None, "local") and not isinstance(backend, Local):
        raise ConfigError(
            f"np={np} with backend={getattr(backend, 'name', backend)!r}: negative means processes of this machine. Use "
            f"np={-np} for workers of the cluster, or leave backend out."
        )
    if resources:
        raise ConfigError(
            f"resources={dict(resources)!r} with np={np}: local processes share the machine. Leave resources out."
        )

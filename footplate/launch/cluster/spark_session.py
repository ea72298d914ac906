"""The Spark session of this process, before workers are placed there (`spark.py`).

This file checks that there is a session which can run barrier stages. It finds the address at which executors reach this
process, the resources of a worker, and the number of workers of that shape that fit.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from footplate.core.errors import ConfigError, LaunchError
from footplate.core.optional import require
from footplate.launch.rendezvous import HOST, listen

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile

# If no executor registers for this time, all executors are registered.
SETTLED_S = 1.0
# The same, if there are too few slots for a launch. The machines of a cluster don't start executors at the same speed.
TOO_FEW_S = 30.0


def active_context() -> SparkContext:
    """The context of this process's session.

    Raises:
        ConfigError: it is a session of Spark Connect.
        LaunchError: there is none.
        MissingExtra: PySpark is not installed.
    """
    require("pyspark", "spark", 'backend="spark"')
    from pyspark import SparkContext
    from pyspark.sql.utils import is_remote

    if is_remote():
        raise ConfigError(
            'backend="spark" with a session of Spark Connect: tasks that run together need RDDs, which Connect doesn\'t '
            "have. Use a session on the driver itself (classic mode; on Databricks, a cluster with dedicated access), or "
            'backend="local".'
        )
    context = SparkContext._active_spark_context
    if context is None:
        raise LaunchError(
            'backend="spark": no Spark session is active in this process. Make one first, with '
            'SparkSession.builder.getOrCreate(), or use processes of this machine: np=-2, or backend="local".'
        )
    return context


def check_settings(get: Callable[[str, str], str | None]) -> None:
    """Refuse a session whose settings exclude barrier mode. `get` returns a setting, or a default."""
    local = re.match(r"local($|\[)", get("spark.master", "") or "")
    if get("spark.dynamicAllocation.enabled", "false") == "true" and not local:
        raise ConfigError(
            "spark.dynamicAllocation.enabled=true: the workers of a launch start together (barrier mode), for which Spark "
            "wants a fixed number of executors. Make the session with it false, and with spark.executor.instances."
        )


def driver_host(get: Callable[[str], str | None]) -> str:
    """The address at which executors reach this process. `get` returns a setting of the session."""
    if re.match(r"local($|\[|-cluster)", get("spark.master") or ""):
        return HOST
    host = get("spark.driver.host") or socket.gethostname()
    try:
        listen(host, 1).close()
    except OSError as error:
        raise ConfigError(
            f"spark.driver.host={host}: executors connect to this process there, but it can't listen on that address "
            f"({error}). Make the session with an address of this machine that they can connect to."
        ) from error
    return host


def resource_profile(
    context: SparkContext, num_cpus: int | None, num_gpus: int | None, profile: ResourceProfile | None
) -> ResourceProfile | None:
    """Make the resource profile of a worker; None for the session's own."""
    from py4j.protocol import Py4JJavaError
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    if num_cpus is not None and num_cpus < 1:
        raise ConfigError(f"num_cpus={num_cpus}: expected 1 or more.")
    if num_gpus is not None and num_gpus < 0:
        raise ConfigError(f"num_gpus={num_gpus}: expected 0 or more.")
    if profile is not None and (num_cpus is not None or num_gpus is not None):
        raise ConfigError("profile= has all resources of a worker: leave num_cpus and num_gpus out.")
    if num_cpus is not None or num_gpus is not None:
        requests = TaskResourceRequests().cpus(num_cpus or int(context.getConf().get("spark.task.cpus", "1") or 1))
        if num_gpus:
            requests = requests.resource("gpu", num_gpus)
        profile = ResourceProfileBuilder().require(requests).build
    if profile is None:
        _check_whole(context.getConf().get("spark.task.resource.gpu.amount", "0"), "spark.task.resource.gpu.amount")
    else:
        if "gpu" in profile.taskResources:
            _check_whole(profile.taskResources["gpu"].amount, "num_gpus")
        if profile.executorResources:
            raise ConfigError(
                f"profile= asks for executors of its own ({', '.join(profile.executorResources)}), which Spark only makes "
                "with dynamic allocation, and that excludes barrier mode. Ask for task resources only, and set those of "
                "executors (spark.executor.…) when you make the session."
            )
        try:
            context.parallelize([], 1).withResources(profile)
        except Py4JJavaError as error:
            raise ConfigError(f"This Spark session can't give each worker these resources: {message(error)}") from error
    return profile


def _check_whole(gpus: str | float | None, name: str) -> None:
    if float(gpus or 0) % 1:
        raise ConfigError(f"{name}={gpus}: a worker has whole GPUs, as its local rank chooses one. Use num_gpus=1.")


def expected_executors(master: str, instances: str | None) -> int | None:
    """The number of executors that a session starts with; None if it isn't known.

    >>> expected_executors("local[4]", None), expected_executors("yarn", "8"), expected_executors("spark://host:7077", None)
    (0, 8, None)
    """
    if re.match(r"local($|\[)", master):
        return 0
    if match := re.match(r"local-cluster\[\s*(\d+)", master):
        return int(match[1])
    return int(instances) if instances else None


def wait_for_executors(context: SparkContext, profile: ResourceProfile | None, wanted: int, within_s: float) -> None:
    """Wait for the executors of a session that was started less than `within_s` seconds ago.

    Args:
        context: the session's.
        profile: the resources of a worker.
        wanted: the number of workers that a launch needs; 0 for all that fit.
        within_s: the longest time.
    """
    check_alive(context)
    conf, until = context.getConf(), context.startTime / 1000 + within_s
    expected = expected_executors(conf.get("spark.master") or "", conf.get("spark.executor.instances"))
    settled_s = TOO_FEW_S if wanted else SETTLED_S
    seen, since = 0, time.monotonic()
    while time.time() < until:
        if wanted and slots(context, profile) >= wanted:
            return
        # Spark counts the driver as an executor.
        registered = len(context.statusTracker().getExecutorInfos()) - 1
        if registered != seen:
            seen, since = registered, time.monotonic()
        settled = bool(registered) and time.monotonic() > since + settled_s
        if registered >= expected if expected is not None else settled:
            return
        time.sleep(0.1)


def slots(context: SparkContext, profile: ResourceProfile | None) -> int:
    """The number of tasks of this shape that the present executors can run at once; busy ones count."""
    from py4j.protocol import Py4JError

    check_alive(context)
    try:
        spark = context._jsc.sc()  # pyright: ignore[reportOptionalMemberAccess, reportOptionalCall]
        ours = profile._java_resource_profile if profile is not None else None
        return spark.maxNumConcurrentTasks(ours or spark.resourceProfileManager().defaultResourceProfile())
    except Py4JError as error:
        raise LaunchError(f"Spark can't tell how many workers it can run: {message(error)}") from error


def check_alive(context: SparkContext) -> None:
    """Raise if the session was stopped."""
    if context._jsc is None:
        raise LaunchError("The Spark session was stopped: make a new one, and launch again.")


def message(error: Exception | None) -> str:
    """The text of an exception; for one of Java, Java's own text."""
    java = getattr(error, "java_exception", None)
    return str(java.getMessage() if java is not None else error or "")

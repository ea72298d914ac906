"""What a Spark session is asked before and while workers are placed on its executors (`spark.py`).

Is there one, and can it run barrier stages? Where do its executors reach this process? What does a worker take, and for how
many of that shape is there room?
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

SETTLED_S = 1.0  # no other executor has come for so long: they are all there


def active_context() -> SparkContext:
    """The context of this process's session."""
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
    """Refuse a session whose settings don't go with barrier mode; `get` gives a setting, or what to take without one."""
    local = re.match(r"local($|\[)", get("spark.master", "") or "")
    if get("spark.dynamicAllocation.enabled", "false") == "true" and not local:
        raise ConfigError(
            "spark.dynamicAllocation.enabled=true: the workers of a launch start together (barrier mode), for which Spark "
            "wants a fixed number of executors. Make the session with it false, and with spark.executor.instances."
        )


def driver_host(get: Callable[[str], str | None]) -> str:
    """The address by which executors reach this process; `get` gives a setting of the session."""
    if re.match(r"local($|\[|-cluster)", get("spark.master") or ""):
        return HOST
    host = get("spark.driver.host") or socket.gethostname()
    try:
        listen(host, 1).close()
    except OSError as error:
        raise ConfigError(
            f"spark.driver.host={host}: executors are to reach this process there, but it can't listen on that address "
            f"({error}). Make the session with an address of this machine that they can connect to."
        ) from error
    return host


def resource_profile(
    context: SparkContext, num_cpus: int | None, num_gpus: int | None, profile: ResourceProfile | None
) -> ResourceProfile | None:
    """The resource profile that is meant, None for the session's own."""
    from py4j.protocol import Py4JJavaError
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    if num_cpus is not None and num_cpus < 1:
        raise ConfigError(f"num_cpus={num_cpus}: expected 1 or more.")
    if num_gpus is not None and num_gpus < 0:
        raise ConfigError(f"num_gpus={num_gpus}: expected 0 or more.")
    if profile is not None and (num_cpus is not None or num_gpus is not None):
        raise ConfigError("profile= says all that a worker takes: leave num_cpus and num_gpus out.")
    if num_cpus is not None or num_gpus is not None:
        wanted = TaskResourceRequests().cpus(num_cpus or int(context.getConf().get("spark.task.cpus", "1") or 1))
        if num_gpus:
            wanted = wanted.resource("gpu", num_gpus)
        profile = ResourceProfileBuilder().require(wanted).build
    if profile is None:
        _check_whole(context.getConf().get("spark.task.resource.gpu.amount", "0"), "spark.task.resource.gpu.amount")
    else:
        if "gpu" in profile.taskResources:
            _check_whole(profile.taskResources["gpu"].amount, "num_gpus")
        if profile.executorResources:
            raise ConfigError(
                f"profile= asks for executors of its own ({', '.join(profile.executorResources)}), which Spark makes with "
                "dynamic allocation only, and that excludes barrier mode. Let it ask for task resources, and say what "
                "executors have (spark.executor.…) when making the session."
            )
        try:
            context.parallelize([], 1).withResources(profile)
        except Py4JJavaError as error:
            raise ConfigError(
                f"This Spark session can't give each worker what it is to take: {message(error)}"
            ) from error
    return profile


def _check_whole(gpus: str | float | None, name: str) -> None:
    if float(gpus or 0) % 1:
        raise ConfigError(f"{name}={gpus}: a worker has whole GPUs, as its local rank chooses one. Use num_gpus=1.")


def expected_executors(master: str, instances: str | None) -> int | None:
    """How many executors a session starts with; None where that can't be known.

    >>> expected_executors("local[4]", None), expected_executors("yarn", "8"), expected_executors("spark://host:7077", None)
    (0, 8, None)
    """
    if re.match(r"local($|\[)", master):
        return 0
    if found := re.match(r"local-cluster\[\s*(\d+)", master):
        return int(found[1])
    return int(instances) if instances else None


def wait_for_executors(context: SparkContext, within_s: float) -> None:
    """Until the executors of a session that was started less than `within_s` seconds ago are there."""
    check_alive(context)
    conf, until = context.getConf(), context.startTime / 1000 + within_s
    expected = expected_executors(conf.get("spark.master") or "", conf.get("spark.executor.instances"))
    seen, since = 0, time.monotonic()
    while time.time() < until:
        there = len(context.statusTracker().getExecutorInfos()) - 1  # the driver counts as one
        if there != seen:
            seen, since = there, time.monotonic()
        if there >= expected if expected is not None else there and time.monotonic() > since + SETTLED_S:
            return
        time.sleep(0.1)


def slots(context: SparkContext, profile: ResourceProfile | None) -> int:
    """How many tasks of this shape the executors that are there now can run at once; the busy ones count."""
    from py4j.protocol import Py4JError

    check_alive(context)
    try:
        spark = context._jsc.sc()  # pyright: ignore[reportOptionalMemberAccess, reportOptionalCall]
        ours = profile._java_resource_profile if profile is not None else None
        return spark.maxNumConcurrentTasks(ours or spark.resourceProfileManager().defaultResourceProfile())
    except Py4JError as error:
        raise LaunchError(f"Spark can't say how many workers it has room for: {message(error)}") from error


def check_alive(context: SparkContext) -> None:
    """Refuse a session that was stopped."""
    if context._jsc is None:
        raise LaunchError("The Spark session was stopped: make another one, and launch again.")


def message(error: Exception | None) -> str:
    """The text of an exception, Java's where it is one."""
    java = getattr(error, "java_exception", None)
    return str(java.getMessage() if java is not None else error or "")

"""Notices that an executor of a Spark application is going to end. Spark calls this *decommissioning*.

A cluster decommissions an executor before it takes the machine: on Kubernetes and in cloud services before a preemption,
and on a standalone cluster when a worker gets SIGPWR. Spark needs `spark.decommission.enabled=true` for it. The executor
still runs its tasks, and gets no new ones.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from footplate.launch.cluster import spark_session

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

LOOK_S = 2.0


class DecommissionWatch:
    """Asks Spark whether an executor of a job group is being decommissioned.

    Args:
        context: the session's.
        group: the job group.
        count: the number of its tasks.
    """

    def __init__(self, context: SparkContext, group: str, count: int) -> None:
        self._context = context
        self._group = group
        self._count = count
        self._executors: set[str] = set()
        self._found = False
        self._look_at = time.monotonic() + LOOK_S

    def look(self) -> bool:
        """Return True once one is. Asks every `LOOK_S`."""
        if self._found or time.monotonic() < self._look_at or self._context._jsc is None:
            return self._found
        from py4j.protocol import Py4JError

        self._look_at = time.monotonic() + LOOK_S
        try:
            leaving = self._leaving()
        except Py4JError as error:
            # The session ends, which the stage will tell.
            log.debug("Spark can't tell what it decommissions: %s", spark_session.message(error))
            return False
        if leaving:
            log.warning("Spark decommissions executor %s, which has some of the ranks", ", ".join(leaving))
            self._found = True
        return self._found

    def _leaving(self) -> list[str]:
        # PySpark has no call for it.
        spark = self._context._jsc.sc()  # pyright: ignore[reportOptionalMemberAccess, reportOptionalCall]
        if not self._executors:
            self._executors = self._find_executors(spark)
        scheduler = spark.taskScheduler()
        return sorted(
            executor for executor in self._executors if scheduler.getExecutorDecommissionState(executor).isDefined()
        )

    def _find_executors(self, spark: Any) -> set[str]:
        """The executors of the tasks, once all of them run; empty before."""
        tracker, store = self._context.statusTracker(), spark.statusStore()
        stages = {
            stage
            for job in tracker.getJobIdsForGroup(self._group)
            if (info := tracker.getJobInfo(job))
            for stage in info.stageIds
        }
        for stage in stages:
            tasks = store.taskList(stage, 0, self._count)
            if tasks.size() == self._count:
                return {tasks.apply(index).executorId() for index in range(self._count)}
        return set()

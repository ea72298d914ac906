"""Agents on Spark: a barrier stage on the session's executors, with one task for each rank.

    driver                                       executors
    slots()       how many such tasks fit at once
    start(n, call)  ──► a thread ──► a job of one barrier stage of n tasks: all of them at the same time, or none
                                                 task i: its GPUs into CUDA_VISIBLE_DEVICES, then call(i)
    close()       the job's group is cancelled ──► Spark kills the tasks that haven't ended

A task lasts as long as its agent, which ends when its connection to the driver does. Results, output and signs of life
use that connection. Spark only transports `call`.

When an executor, a Python worker or a `call` fails, Spark ends the whole stage, and the job with it. The job's exception
says why. In barrier mode Spark never runs the last stage of a job again, whatever `spark.task.maxFailures` says, because
some of its tasks may have had effects. So one job is one group of agents, and the next attempt is a new job. It waits until
there are as many slots as it needs: a lost executor is mostly replaced within seconds.

When Spark decommissions an executor (`spark_decommissioning.py`), the ranks save and end, and go on elsewhere.

Why not Spark's own ways: Spark retries a job that doesn't fit for ten minutes before it refuses it, so this file counts
slots first. `TorchDistributor` never restarts, starts a new interpreter for each rank, and in its local mode returns the
value of whichever rank was last.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from footplate.core.errors import LaunchError
from footplate.launch.cluster import spark_session
from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.placement import CountedSlots, Lost
from footplate.launch.cluster.spark_decommissioning import DecommissionWatch

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile

log = logging.getLogger(__name__)

POLL_S = 0.1
# Time for the replacement of a lost executor to register.
REGISTER_S = 60.0
# Time for the first executors of a session. Each starts a Java machine, and several of them on one host are slow.
START_S = 120.0
# Time for tasks to end, after their agents have lost the driver.
ENDS_S = 2.0
# Time until a job that doesn't begin is logged.
QUEUED_S = 10.0
# Time for Spark to kill tasks. It checks every two seconds, and gives the tasks two seconds more.
KILL_S = 15.0


class SparkPlacement(CountedSlots):
    """A `Placement` on the executors of the Spark session that is active in this process.

    Args:
        num_cpus: cores of an executor for a worker; None for `spark.task.cpus`.
        num_gpus: GPUs for a worker, a whole number; None for `spark.task.resource.gpu.amount`.
        profile: all resources of a worker, as Spark's own resource profile, instead of both.
        min_workers: the fewest workers that are enough. The launch then goes on without a lost executor, and with its
            replacement. None to wait for all.

    Raises:
        ConfigError: this session doesn't support it.
        LaunchError: no session is active.
        MissingExtra: PySpark is not installed.
    """

    name = "spark"

    def __init__(
        self,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        profile: ResourceProfile | None = None,
        min_workers: int | None = None,
    ) -> None:
        self.min_workers = min_workers
        self._context = spark_session.active_context()
        spark_session.check_settings(self._context.getConf().get)
        self.host = spark_session.driver_host(self._context.getConf().get)
        self._profile = spark_session.resource_profile(self._context, num_cpus, num_gpus, profile)
        self._stage: _Stage | None = None

    def slots(self, wanted: int = 0) -> int:
        """The number of tasks of this shape that the session's executors can run at once.

        In the first two minutes of a session, waits for executors that start.
        """
        spark_session.wait_for_executors(self._context, self._profile, wanted, START_S)
        return spark_session.slots(self._context, self._profile)

    def room(self) -> int:
        return spark_session.slots(self._context, self._profile)

    def leaving(self) -> bool:
        return self._stage is not None and self._stage.leaving()

    def start(self, slots: Sequence[int], call: AgentCall) -> None:
        self.close()
        spark_session.check_alive(self._context)
        self._stage = _Stage(self._context, self._profile, self.host, len(slots), call)

    def lost(self) -> list[Lost]:
        return self._stage.lost() if self._stage is not None else []

    def close(self) -> None:
        if self._stage is not None:
            self._stage.end()
            self._stage = None


class _Stage:
    """One group of agents: a job in a thread of its own, from its submission until all of its tasks have ended."""

    def __init__(
        self, context: SparkContext, profile: ResourceProfile | None, host: str, count: int, call: AgentCall
    ) -> None:
        from pyspark.util import InheritableThread

        self._context = context
        self._profile = profile
        self._host = host
        self._count = count
        self._call = call
        self._group = f"footplate-{uuid.uuid4().hex[:12]}"
        self._ending = threading.Event()
        self._cancelled = False
        self._failure: StageFailure | None = None
        self._watch = DecommissionWatch(context, self._group, count)
        # The time to log that no task has begun.
        self._warn_at = time.monotonic() + QUEUED_S
        self._thread = InheritableThread(target=self._run, name=self._group, daemon=True)
        self._thread.start()

    def lost(self) -> list[Lost]:
        """Return all allocations, once, as soon as the job has failed: the stage ends as a whole."""
        failure, self._failure = self._failure, None
        if failure is None:
            self._warn_of_a_queue()
            return []
        if failure.raised:
            raise LaunchError(
                f"An agent can't run on Spark's executors: {failure.text}\n(Executors import the footplate that is "
                f"installed there, and reach this driver at {self._host}, which is spark.driver.host.)"
            )
        return [Lost(index, failure.text) for index in range(self._count)]

    def leaving(self) -> bool:
        """True once Spark decommissions an executor of the job."""
        return self._watch.look()

    def end(self) -> None:
        """End the job; no task is left when this returns."""
        self._ending.set()
        self._thread.join(ENDS_S)
        until = time.monotonic() + KILL_S
        while (runs := self._thread.is_alive() or self._active_tasks()) and time.monotonic() < until:
            self._cancel()
            time.sleep(POLL_S)
        if runs:
            log.warning("Spark has not ended the tasks of job group %s within %g s", self._group, KILL_S)

    def _run(self) -> None:
        try:
            if self._wait_for_slots():
                description = f"Footplate: {self._count} workers"
                self._context.setJobGroup(self._group, description, interruptOnCancel=True)
                tasks = self._context.parallelize(range(self._count), self._count)
                if self._profile is not None:
                    tasks = tasks.withResources(self._profile)
                tasks.barrier().mapPartitions(partial(_task, self._call)).collect()
                self._failure = StageFailure("their tasks have ended")
        except Exception as error:
            if not self._cancelled:
                self._failure = failure = parse_failure(spark_session.message(error))
                if not failure.raised:
                    log.warning("Spark has ended the tasks of all %d workers: %s", self._count, failure.text)

    def _wait_for_slots(self) -> bool:
        """Wait until all tasks fit; return False if the stage is cancelled before."""
        until = time.monotonic() + REGISTER_S
        while (slots := spark_session.slots(self._context, self._profile)) < self._count:
            if time.monotonic() > until:
                raise LaunchError(f"executors have slots for {slots} of {self._count} workers after {REGISTER_S:g} s")
            if self._ending.wait(POLL_S):
                return False
        return not self._ending.is_set()

    def _warn_of_a_queue(self) -> None:
        """Log once that the stage has not begun, although there are slots for it."""
        if time.monotonic() > self._warn_at:
            self._warn_at = float("inf")
            if not self._active_tasks():
                log.warning(
                    "Spark has not started the %d workers for %g s: executors are missing, or busy with other jobs of this "
                    "session. Waiting for them", self._count, QUEUED_S,
                )  # fmt: skip

    def _active_tasks(self) -> int:
        """The number of tasks of the job, with those that are being killed."""
        if self._context._jsc is None:
            return 0
        tracker = self._context.statusTracker()
        jobs = filter(None, map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._group)))
        stages = filter(None, (tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds))
        return sum(stage.numActiveTasks for stage in stages)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._context._jsc is not None:
            self._context.cancelJobGroup(self._group)


@dataclass(frozen=True)
class StageFailure:
    """The failure of a barrier stage.

    Attributes:
        text: the reason, in one line.
        raised: whether a task has raised an exception, which it would do again.
    """

    text: str
    raised: bool = False


def parse_failure(message: str) -> StageFailure:
    """Read the failure from the text of a job's exception.

    >>> parse_failure("… barrier task ResultTask(2, 1) finished unsuccessfully.\\nExecutorLostFailure (executor 7) …\\n")
    StageFailure(text='ExecutorLostFailure (executor 7) …', raised=False)
    """
    _, _, reason = message.rpartition("finished unsuccessfully.\n")
    _, raised, traceback = reason.rpartition("Traceback (most recent call last):")
    lines = [line for line in traceback.splitlines() if line.strip() and not (raised and line.startswith(" "))]
    text = lines[0].strip() if lines else "the job is gone"
    return StageFailure(text.removeprefix("footplate.core.errors.LaunchError: "), bool(raised))


def _task(call: AgentCall, rows: Iterable[int]) -> Iterator[Any]:
    """Run the agent in an executor. Its Python process serves other tasks afterwards, so changes are undone."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    gpus = context.resources().get("gpu")
    environment = dict(os.environ)
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
    try:
        # CONTAINER_ID is YARN's, which counts the memory of each container.
        call(context.partitionId(), os.environ.get("CONTAINER_ID", ""))
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return iter(())

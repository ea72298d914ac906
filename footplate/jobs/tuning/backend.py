"""The backend of a tuning's own job. Its trials run on the backend that the job names, and it needs nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

from footplate.core.errors import Unavailable
from footplate.jobs.backends import get_backend
from footplate.jobs.backends.contract import RunningProcesses, Task
from footplate.jobs.fork_server.starting import TuningForkServer, is_supported
from footplate.jobs.record import Job, Process
from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.store.jobs import Store
from footplate.jobs.tuning.attempt import TuningAttempt


class TuningBackend:
    """Where a tuning runs: in its supervisor, and in its trials.

    Args:
        store: the store of the jobs.
    """

    # The trials have supervisors of their own.
    outlives = True

    def __init__(self, store: Store) -> None:
        self._store = store

    def find(self, task: Task) -> TuningAttempt:
        """The tuning, as far as it is. Trials on other machines don't begin from a fork of a process of this one."""
        needs = get_backend(task.job.backend).needs(ResolvedJob.from_dict(task.job.spec))
        forks = task.job.backend == "local" and is_supported()
        fork_server = TuningForkServer(task.home, task.execution) if forks else None
        return TuningAttempt(task.home, self._store, task.job, needs, task.folder, fork_server)

    def prepare(self, task: Task) -> None:
        """Do nothing: each trial installs its package."""

    def begin(self, task: Task) -> TuningAttempt:
        """The tuning from its beginning."""
        return self.find(task)

    def reach(self, job: Job, processes: Sequence[Process], what: str) -> RunningProcesses:
        """Refuse: the processes belong to trials.

        Raises:
            Unavailable: always.
        """
        raise Unavailable(
            f"{job.name} is a tuning, and its trials have processes. Ask one: footplate jobs {what} {job.name}_trial_1"
        )

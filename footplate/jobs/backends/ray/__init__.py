"""Jobs on a Ray cluster: each attempt is a Ray Job, and continues when its supervisor dies.

this machine                       │  the cluster
supervisor ─► attempt.py           │
              listener.py ─ HTTP ──►  Ray's Jobs API ─► entrypoint.py on the head ─► replica_actor.py, one for each
              client.py            │                    resources.py                 replica ─► its process
              bundle.py, request.py│                    log_protocol.py: output and events, as lines
jobs stacks ─► asking.py ─── HTTP ──►  Ray's Jobs API ─► question.py on the head ─► replica_actor.py

resources.py      the resources that replicas request from the nodes
request.py        the request to Ray, as plain values
bundle.py         the zip that is sent: the package, and Footplate itself
entrypoint.py     one attempt, on the cluster: placed, begun, judged and ended together
replica_actor.py  one replica, on its node: installation, process, output
log_protocol.py   output and events as lines of the entry point's output
client.py         the Jobs API; listener.py: a thread that uses it; attempt.py: the supervisor's view
question.py       a question to all replicas, for their stacks or a profile, on the cluster; asking.py: asks it from here

who dies                     what follows
a replica's process          the entry point judges its exit code, as on this machine
a node                       the attempt is lost. A new one is placed on the remaining nodes, and the program isn't blamed
the entry point, or the head the same: Ray ends the remaining processes
the supervisor               nothing: the next one follows the attempt from its beginning, and writes down what is missing
the network, the dashboard   nothing: the supervisor retries without limit. But if the cluster can't be told to end a job,
                             the supervisor gives up a minute after the grace period, and says so
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from footplate.core.errors import ConfigError, Unavailable
from footplate.jobs import process_env
from footplate.jobs.backends.contract import Task
from footplate.jobs.record import Job, Process
from footplate.jobs.scheduling import Resources
from footplate.jobs.states import State

if TYPE_CHECKING:
    from footplate.jobs.backends.ray.asking import RayProcesses
    from footplate.jobs.backends.ray.attempt import RayAttempt
    from footplate.jobs.package import Snapshot
    from footplate.jobs.spec.resolving import ResolvedJob

USUAL = "http://127.0.0.1:8265"
BUNDLE = "bundle.zip"


class Ray:
    """A Ray cluster."""

    outlives = True

    def destination(self, options: Mapping[str, str | None]) -> dict[str, str]:
        """The address of the dashboard: `--address`, RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or this machine's.

        Raises:
            ConfigError: it is another kind of address, or contains a secret.
        """
        names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
        requested = options.get("address") or next((os.environ[name] for name in names if os.environ.get(name)), "auto")
        address = USUAL if requested in ("auto", "local") else requested.rstrip("/")
        if not address.startswith(("http://", "https://")):
            raise ConfigError(
                f"{requested}: expected the address of a Ray cluster's dashboard, such as "
                "http://10.0.0.1:8265. Give it with --address, or as RAY_API_SERVER_ADDRESS."
            )
        if "@" in urlsplit(address).netloc:
            raise ConfigError(
                "The address of the Ray cluster contains a user. It would be kept with the job, and appear in its logs: "
                "expected one without, such as http://10.0.0.1:8265."
            )
        return {"address": address}

    def check(self, resolved: ResolvedJob, destination: Mapping[str, str]) -> list[str]:
        """Check that the job can run on Ray. Returns what the cluster lacks, and what its nodes may not reach.

        Raises:
            Unavailable: no cluster answers at the address.
            ConfigError: the job can't run on Ray as it is.
        """
        from footplate.core.optional import require
        from footplate.jobs.backends.ray import request, resources
        from footplate.jobs.backends.ray.client import Away, Client
        from footplate.jobs.translate.common import refuse_without_package

        refuse_without_package(resolved, "Ray")
        require("ray.job_submission", "ray", "A job on a Ray cluster")
        try:
            nodes = Client(destination["address"]).nodes()
        except Away as error:
            raise Unavailable(
                f"No Ray cluster takes jobs at {destination['address']}: {error}. Start one with `ray start --head`, or "
                "give the address of its dashboard with --address."
            ) from None
        needs = resources.needs(resolved.to_dict()["replicas"])
        return [*resources.shortages(needs, nodes), *request.notices(resolved, len(nodes))]

    def needs(self, resolved: ResolvedJob) -> Resources:
        """The resources of this machine that the job needs: none, since it runs elsewhere."""
        return Resources()

    def request(
        self, resolved: ResolvedJob, destination: Mapping[str, str], package: Snapshot | None
    ) -> dict[str, Any]:
        """The arguments of `JobSubmissionClient.submit_job`.

        Raises:
            ConfigError: the job can't run on Ray as it is.
        """
        from footplate.jobs.backends.ray import request
        from footplate.jobs.execution import Execution
        from footplate.jobs.translate.common import refuse_without_package

        refuse_without_package(resolved, "Ray")
        plan = Execution.of(resolved, "DIGEST", Path.cwd(), destination)
        task = request.document(f"{resolved.name}-TIME", 1, plan, resolved.to_dict(), process_env.lasting(os.environ))
        return request.submission(task, resolved.labels, BUNDLE)

    def find(self, task: Task) -> RayAttempt | None:
        """Find the attempt, if it was begun. This doesn't need the cluster."""
        from footplate.jobs.backends.ray.attempt import RayAttempt

        if not RayAttempt.is_there(task.folder):
            return None
        return _attempt(task, begun=task.job.attempt == task.attempt and task.job.state == State.RUNNING)

    def prepare(self, task: Task) -> None:
        """Pack the bundle."""
        from footplate.jobs.backends.ray import bundle

        bundle.pack(task.execution.package, task.home.root, task.folder / BUNDLE, task.key)

    def begin(self, task: Task) -> RayAttempt:
        """Submit the attempt as soon as the cluster can be reached."""
        return _attempt(task)

    def reach(self, job: Job, processes: Sequence[Process], what: str) -> RayProcesses:
        """Return the processes, which are asked over the cluster's Jobs API, from any machine that reaches it."""
        from footplate.jobs.backends.ray.asking import RayProcesses
        from footplate.jobs.execution import Execution

        address = Execution.from_dict(job.plan).place["address"]
        return RayProcesses(job.name, address, f"{job.id}-{job.attempt}")


def _attempt(task: Task, begun: bool = False) -> RayAttempt:
    from footplate.jobs.backends.ray import bundle, request
    from footplate.jobs.backends.ray.attempt import RayAttempt

    path = task.folder / BUNDLE

    def arguments() -> dict[str, Any]:
        if not path.exists():
            bundle.pack(task.execution.package, task.home.root, path, task.key)
        variables = process_env.read(task.home.job(task.execution.name), {})
        document = request.document(task.job.id, task.attempt, task.execution, task.job.spec, variables)
        return request.submission(document, task.job.labels, str(path))

    count = sum(replica.count for replica in task.execution.replicas)
    return RayAttempt(
        task.execution.place["address"], task.key, task.attempt, task.folder, count, arguments,
        lambda: path.unlink(missing_ok=True), begun,
    )  # fmt: skip


BACKEND = Ray()

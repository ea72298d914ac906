"""Jobs on a Ray cluster: each attempt is a Ray Job, which goes on when its supervisor dies.

this machine                      │  the cluster
supervisor ─► attempt.py          │
              listener.py ── HTTP ──► Ray's Jobs API ─► driver.py on the head ─► replica.py, an actor for each
              client.py           │                       resources.py                 replica ─► its process
              bundle.py, request.py│                       lines.py: all that is heard of them

resources.py      what replicas ask of the nodes
request.py   what Ray is asked for, as plain values
bundle.py     what is sent: the package, and Footplate itself
driver.py    one attempt, on the cluster: placed together, begun together, judged, ended together
replica.py      one replica, on its node: the package installed there, the process, its output
lines.py     how output and events travel in the driver's output
client.py    the Jobs API; listener.py: a thread that speaks with it; attempt.py: what the supervisor makes of it

who dies                     what follows
a replica's process          its exit code is judged, by the driver, as on this machine
a node                       the attempt is lost with it; a new one is placed on what there is, and the program is not to
                             blame
the driver, or the head      the same: Ray ends what they have left
the supervisor               nothing: the next one takes the attempt up, hears it from its beginning, and writes down
                             what isn't written yet
the network, the dashboard   nothing: the supervisor tries again, for as long as it takes; but a cluster that can't be told
                             that a job is to end is given up after a minute and the grace, and that is said
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from footplate.core.errors import ConfigError, Unavailable
from footplate.jobs import process_env
from footplate.jobs.backends.contract import Task
from footplate.jobs.scheduling import Resources
from footplate.jobs.states import State

if TYPE_CHECKING:
    from footplate.jobs.backends.ray.attempt import RayAttempt
    from footplate.jobs.package import Snapshot
    from footplate.jobs.spec.resolving import ResolvedJob

USUAL = "http://127.0.0.1:8265"
BUNDLE = "bundle.zip"


class Ray:
    """A Ray cluster."""

    outlives = True

    def destination(self, options: Mapping[str, str | None]) -> dict[str, str]:
        """The address of its dashboard: `--address`, RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or that of this machine's.

        Raises:
            ConfigError: it is an address of another kind, or has a secret in it.
        """
        names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
        given = options.get("address") or next((os.environ[name] for name in names if os.environ.get(name)), "auto")
        address = USUAL if given in ("auto", "local") else given.rstrip("/")
        if not address.startswith(("http://", "https://")):
            raise ConfigError(
                f"{given}: expected the address of a Ray cluster's dashboard, where it takes jobs, such as "
                "http://10.0.0.1:8265. Give it with --address, or as RAY_API_SERVER_ADDRESS."
            )
        if "@" in urlsplit(address).netloc:
            raise ConfigError(
                "The address of the Ray cluster has a user in it. It would be kept with the job, and shown in its logs: "
                "expected one without, such as http://10.0.0.1:8265."
            )
        return {"address": address}

    def check(self, resolved: ResolvedJob, place: Mapping[str, str]) -> list[str]:
        """What the cluster lacks; what its nodes may not reach.

        Raises:
            Unavailable: nobody takes jobs there.
            ConfigError: the job can't run on Ray as it is.
        """
        from footplate.core.optional import require
        from footplate.jobs.backends.ray import request, resources
        from footplate.jobs.backends.ray.client import Away, Client

        request.refuse(resolved)
        require("ray.job_submission", "ray", "A job on a Ray cluster")
        try:
            nodes = Client(place["address"]).nodes()
        except Away as error:
            raise Unavailable(
                f"No Ray cluster takes jobs at {place['address']}: {error}. Start one with `ray start --head`, or give the "
                "address of its dashboard with --address."
            ) from None
        needs = resources.needs(resolved.to_dict()["replicas"])
        return [*resources.shortages(needs, nodes), *request.notices(resolved, len(nodes))]

    def needs(self, resolved: ResolvedJob) -> Resources:
        """Nothing of this machine."""
        return Resources()

    def request(self, resolved: ResolvedJob, place: Mapping[str, str], package: Snapshot | None) -> dict[str, Any]:
        """The arguments of `JobSubmissionClient.submit_job`.

        Raises:
            ConfigError: the job can't run on Ray as it is.
        """
        from footplate.jobs.backends.ray import request
        from footplate.jobs.execution import Execution

        request.refuse(resolved)
        plan = Execution.of(resolved, "DIGEST", Path.cwd(), place)
        task = request.document(f"{resolved.name}-TIME", 1, plan, resolved.to_dict(), process_env.lasting(os.environ))
        return request.submission(task, resolved.labels, BUNDLE)

    def find(self, task: Task) -> RayAttempt | None:
        """The attempt, if it was begun: the cluster needn't be there to tell."""
        from footplate.jobs.backends.ray.attempt import RayAttempt

        if not RayAttempt.is_there(task.folder):
            return None
        return _attempt(task, begun=task.job.attempt == task.attempt and task.job.state == State.RUNNING)

    def prepare(self, task: Task) -> None:
        """Pack what is sent."""
        from footplate.jobs.backends.ray import bundle

        bundle.pack(task.execution.package, task.home.root, task.folder / BUNDLE, task.key)

    def begin(self, task: Task) -> RayAttempt:
        """Have the attempt submitted, as soon as the cluster can be reached."""
        return _attempt(task)


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

    count = sum(one.count for one in task.execution.replicas)
    return RayAttempt(
        task.execution.place["address"], task.key, task.attempt, task.folder, count, arguments,
        lambda: path.unlink(missing_ok=True), begun,
    )  # fmt: skip


BACKEND = Ray()

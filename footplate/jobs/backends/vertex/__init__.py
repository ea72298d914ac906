"""Jobs on Vertex AI: an attempt is a CustomJob, created and followed over REST.

destination.py    project and staging bucket
distributions.py  a job's package, as distributions in the bucket
bootstrap.py      the first program in each replica
request.py        the body of the request that creates an attempt
client.py         one request to Google, and its errors
attempt.py        one attempt: begun, followed, cancelled
creation.py       exactly one CustomJob for it, whatever message is lost
logs.py           its output, from Cloud Logging
outcome.py        what its end means
attempt_record.py the record of an attempt on this machine
timestamps.py     timestamps of Google's services

    who dies               what follows
    this machine           nothing: Google runs the job. The next reconcile pass here continues to fetch its output
    a replica's program    Vertex AI ends the job; the supervisor here decides, as everywhere, if another attempt follows
    Google's machine       the same, and the program isn't to blame

So the next attempt needs a supervisor here, and thus a reconcile pass (`jobs daemon`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from footplate.core.errors import ConfigError, Unavailable
from footplate.core.optional import require
from footplate.jobs import process_env
from footplate.jobs.backends.contract import Task
from footplate.jobs.record import Job, Process
from footplate.jobs.scheduling import Resources
from footplate.jobs.tuning.trial_jobs import variables_of_all, variables_of_master

if TYPE_CHECKING:
    from footplate.jobs.backends.vertex.attempt import CustomJob
    from footplate.jobs.backends.vertex.distributions import Distribution
    from footplate.jobs.package import Snapshot
    from footplate.jobs.spec.resolving import ResolvedJob

# Variables with the identity for Google's services, and their addresses.
_OURS = ("CLOUDSDK_", "GOOGLE_", "STORAGE_EMULATOR_")


class Vertex:
    """A project of Google Cloud."""

    outlives = True

    def destination(self, options: Mapping[str, str | None]) -> dict[str, str]:
        """Find the project and the staging bucket.

        Args:
            options: `project`, `staging-bucket`, `job-dir`.

        Raises:
            ConfigError: one of them isn't given, or is wrong.
        """
        from footplate.jobs.backends.vertex import destination

        staging = destination.staging(options.get("staging-bucket"), options.get("job-dir"))
        return {"project": destination.project(options.get("project")), "staging_bucket": staging}

    def check(self, resolved: ResolvedJob, destination: Mapping[str, str]) -> list[str]:
        """Check that Vertex AI can run the job, as far as this machine knows. Returns what it leaves out.

        Raises:
            ConfigError: it can't; google-auth isn't installed.
        """
        from footplate.jobs.backends.vertex.client import PURPOSE, Client
        from footplate.jobs.translate.vertex import translate

        require("google.auth", "vertex", PURPOSE)
        Client(destination["project"], _region(resolved))
        _, *notes = translate(_as_asked(resolved)).notes
        if "hyperparameters" in resolved.spec and not resolved.command:
            raise ConfigError(
                f"{resolved.name}: the spec names a container image and no module, so its trials couldn't report. Give "
                "--module-name."
            )
        return notes

    def needs(self, resolved: ResolvedJob) -> Resources:
        """The resources of this machine that the job needs: none, since it runs elsewhere."""
        return Resources()

    def request(self, resolved: ResolvedJob, destination: Mapping[str, str], package: Snapshot) -> dict[str, Any]:
        """The request that creates the first attempt. Its label and FOOTPLATE_JOB_ID include the time of the submission.

        Raises:
            ConfigError: Vertex AI can't run the job as it is.
            PackageError: the package can't be sent.
        """
        from footplate.jobs.backends.vertex.client import endpoint
        from footplate.jobs.backends.vertex.distributions import distributions
        from footplate.jobs.backends.vertex.request import path

        files = distributions(package)
        region = _region(resolved)
        body = _body(resolved, destination, files, f"{resolved.name}-TIME", 1)
        return {"method": "POST", "url": endpoint("aiplatform", region) + path(destination, region), "body": body}

    def find(self, task: Task) -> CustomJob | None:
        """Find the attempt, if its CustomJob was requested. Following it shows if there is one."""
        from footplate.jobs.backends.vertex.attempt_record import AttemptRecord

        return self._attempt(task) if AttemptRecord.read(task.folder).asked is not None else None

    def prepare(self, task: Task) -> None:
        """Check that the package can be sent. It is uploaded when the attempt creates its CustomJob.

        Raises:
            FootplateError: it can't be sent.
        """
        from footplate.jobs.backends.vertex.distributions import distributions
        from footplate.jobs.package import stored

        distributions(stored(task.execution.package, task.home.root))

    def begin(self, task: Task) -> CustomJob:
        """Begin an attempt, which then creates its CustomJob."""
        return self._attempt(task)

    def reach(self, job: Job, processes: Sequence[Process], what: str) -> NoReturn:
        """Raise: nobody else can send a message to the processes of a CustomJob.

        Raises:
            Unavailable: always.
        """
        raise Unavailable(
            f"the processes of {job.name} run on Vertex AI, and can't be asked from here. Ask on the machine of the "
            f"process, with its id: footplate {what} PID"
        )

    def _attempt(self, task: Task) -> CustomJob:
        from footplate.jobs.backends.vertex.attempt import CustomJob
        from footplate.jobs.backends.vertex.client import Client
        from footplate.jobs.backends.vertex.distributions import distributions, upload
        from footplate.jobs.backends.vertex.request import path
        from footplate.jobs.package import stored
        from footplate.jobs.spec.resolving import ResolvedJob

        _be_the_submitter(task)
        resolved, destination = ResolvedJob.from_dict(task.job.spec), task.execution.place
        region = _region(resolved)

        def body() -> dict[str, Any]:
            files = distributions(stored(task.execution.package, task.home.root))
            content = _body(resolved, destination, files, task.job.id, task.attempt, task.execution.trial)
            upload(files, destination["staging_bucket"])
            return content

        replica_ids = [(replica.role, index) for replica in resolved.replicas for index in range(replica.count)]
        client = Client(destination["project"], region)
        return CustomJob(client, path(destination, region), task.key, task.folder, replica_ids, task.attempt, body)


def _body(
    resolved: ResolvedJob,
    destination: Mapping[str, str],
    files: list[Distribution],
    job_id: str,
    attempt: int,
    trial: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    from footplate.jobs.backends.vertex.request import body

    variables = {
        "FOOTPLATE_JOB_NAME": resolved.name or "",
        "FOOTPLATE_JOB_ID": job_id,
        "FOOTPLATE_JOB_ATTEMPT": str(attempt),
        "FOOTPLATE_ATTEMPT": str(attempt - 1),
        "PYTHONUNBUFFERED": "1",
        **({"FOOTPLATE_JOB_DIR": resolved.job_dir} if resolved.job_dir else {}),
        **({**variables_of_all(trial), **variables_of_master(trial)} if trial is not None else {}),
    }
    *packages, launcher = [file.uri(destination["staging_bucket"]) for file in files]
    return body(_one_training(resolved), packages, launcher, f"{job_id}-{attempt}", variables)


def _as_asked(resolved: ResolvedJob) -> ResolvedJob:
    """The job for Google: its packages are in the bucket, and the supervisor here counts its waiting time."""
    scheduling = {key: value for key, value in resolved.spec.get("scheduling", {}).items() if key != "maxWaitTime"}
    packages = ["gs://bucket/package.tar.gz"]
    return replace(resolved, spec={**_one_training(resolved).spec, "packageUris": packages, "scheduling": scheduling})


def _one_training(resolved: ResolvedJob) -> ResolvedJob:
    """The job without its tuning, whose trials are jobs of their own."""
    return replace(resolved, spec={key: value for key, value in resolved.spec.items() if key != "hyperparameters"})


def _region(resolved: ResolvedJob) -> str:
    if resolved.region is None:
        raise ConfigError("Vertex AI runs jobs in a region: give --region, such as us-central1.")
    return resolved.region


def _be_the_submitter(task: Task) -> None:
    """Give Google's libraries in this process the environment of the submission."""
    kept = process_env.read(task.home.job(task.execution.name), os.environ)
    for name in process_env.lasting(os.environ).keys() - kept.keys():
        # A value of another shell, or of another job's supervisor, that started this process.
        if name.startswith(_OURS):
            del os.environ[name]
    os.environ.update({name: value for name, value in kept.items() if name.startswith(_OURS)})


BACKEND = Vertex()

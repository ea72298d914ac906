"""The request for an attempt's CustomJob, as plain values. `translate/vertex.py` describes the job; this module adds:

labels        footplate_attempt, a digest of the attempt's key, which identifies the CustomJob; footplate_job, for people
programs      Google's images install the packages, and start `footplate_launch`. In a user's own image `launch.py` from the
              bucket does both. An image that runs its own command isn't changed
environment   FOOTPLATE_*, as on this machine
scheduling    Vertex AI retries nothing: each start is a counted attempt, which the program knows of, so that it continues
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from footplate.jobs.backends.vertex.distributions import LAUNCHER
from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.translate.vertex import translate

LABEL = "footplate_attempt"


def path(destination: Mapping[str, str], region: str) -> str:
    """The path for creating and listing CustomJobs, without the host."""
    return f"/v1/projects/{destination['project']}/locations/{region}/customJobs"


def mark(key: str) -> str:
    """The label of an attempt. A label is short, and has no capitals."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def body(
    job: ResolvedJob,
    packages: Sequence[str],
    launcher: str,
    key: str,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Make the body of the request that creates an attempt.

    Args:
        job: the job.
        packages: the URIs of its distributions; empty if its image has everything.
        launcher: the URI of `launch.py`.
        key: the attempt's key.
        variables: the variables of its programs.

    Raises:
        Untranslatable: Vertex AI can't run the job as it is.
    """
    request: Any = translate(replace(job, spec={**job.spec, "packageUris": list(packages)})).document
    name = re.sub(r"[^a-z0-9_-]", "_", (job.name or "").lower())[:63]
    spec = request["jobSpec"]
    request["labels"] = {**job.labels, "footplate_job": name, LABEL: mark(key)}
    spec["scheduling"] = {
        "timeout": job.max_running_time,
        "restartJobOnWorkerRestart": False,
        "disableRetries": True,
    }
    env = [{"name": variable, "value": value} for variable, value in sorted(variables.items())]
    for pool in filter(None, spec["workerPoolSpecs"]):
        program = pool.get("pythonPackageSpec") or pool["containerSpec"]
        program["env"] = env
        if "pythonModule" in program:
            program["args"] = [program["pythonModule"], *program.get("args", ())]
            program["pythonModule"] = LAUNCHER
        elif program.get("command") == list(job.command[:3]):
            # The command runs the module, not the image's own command.
            installed = [*map(_mounted, packages), "--"] if packages else []
            program["command"] = ["python", _mounted(launcher), *installed, job.command[2]]
    return request


def _mounted(uri: str) -> str:
    """The path at which Vertex AI mounts an object in a container."""
    return uri.replace("gs://", "/gcs/", 1)

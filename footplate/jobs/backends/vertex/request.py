"""A CustomJob for one attempt of a job, as plain values: `translate/vertex.py` says the job, this what makes it ours.

labels        footplate_attempt, by which the attempt is found again: a digest of its key; footplate_job, for people
programs      an image of Google's installs the packages, and starts `footplate_launch`; in one of the user's
              `launch.py` does both, from the bucket; one that runs a command of its own is left as it is
environment   FOOTPLATE_*, as on this machine
scheduling    Vertex AI tries nothing again: every new start is an attempt of ours, which is counted, and told to the
              program, so that it continues
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


def path(place: Mapping[str, str], region: str) -> str:
    """Where CustomJobs are created and listed, without the host."""
    return f"/v1/projects/{place['project']}/locations/{region}/customJobs"


def mark(key: str) -> str:
    """The label of an attempt: a label is short, and without capitals."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def body(
    job: ResolvedJob,
    packages: Sequence[str],
    launcher: str,
    key: str,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """The body of the request that creates an attempt.

    Args:
        job: the job.
        packages: the URIs of its distributions; empty if its image has all.
        launcher: the URI of `launch.py`.
        key: the attempt's.
        variables: what its programs are told.

    Raises:
        Untranslatable: Vertex AI can't run it as it is.
    """
    made: Any = translate(replace(job, spec={**job.spec, "packageUris": list(packages)})).document
    name = re.sub(r"[^a-z0-9_-]", "_", (job.name or "").lower())[:63]
    spec = made["jobSpec"]
    made["labels"] = {**job.labels, "footplate_job": name, LABEL: mark(key)}
    spec["scheduling"] = {
        "timeout": job.max_running_time,
        "restartJobOnWorkerRestart": False,
        "disableRetries": True,
    }
    env = [{"name": one, "value": value} for one, value in sorted(variables.items())]
    for pool in filter(None, spec["workerPoolSpecs"]):
        program = pool.get("pythonPackageSpec") or pool["containerSpec"]
        program["env"] = env
        if "pythonModule" in program:
            program["args"] = [program["pythonModule"], *program.get("args", ())]
            program["pythonModule"] = LAUNCHER
        elif program.get("command") == list(job.command[:3]):  # the module, not a command of the image's own
            installed = [*map(_mounted, packages), "--"] if packages else []
            program["command"] = ["python", _mounted(launcher), *installed, job.command[2]]
    return made


def _mounted(uri: str) -> str:
    """Where Vertex AI mounts an object in a container."""
    return uri.replace("gs://", "/gcs/", 1)

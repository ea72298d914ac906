"""Translate a job into a document of another system.

    vertex.py     Vertex AI           a CustomJob, for its REST API
    ray.py        Ray                 the body of a job submission
    kubeflow.py   Kubeflow 1          a PyTorchJob, or a TFJob with parameter servers or evaluators
    trainjob.py   Kubeflow Trainer 2  a TrainJob and its TrainingRuntime
    jobset.py     JobSet              a JobSet, on any Kubernetes that has its controller
    slurm.py      Slurm               a script for sbatch

Each module has one pure function from a resolved job to a `Translation`: a document, and notes about what it leaves out
and what the user still has to do. If the system can't run the job, the function raises with all reasons (`common.py`;
`kubernetes.py` for the three on Kubernetes).
"""

from __future__ import annotations

from collections.abc import Callable

from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.translate import jobset, kubeflow, ray, slurm, trainjob, vertex
from footplate.jobs.translate.common import Translation, Untranslatable

__all__ = ["TARGETS", "Translation", "Untranslatable", "translate"]

TARGETS: dict[str, Callable[[ResolvedJob], Translation]] = {
    "vertex": vertex.translate,
    "ray": ray.translate,
    "kubeflow": kubeflow.translate,
    "trainjob": trainjob.translate,
    "jobset": jobset.translate,
    "slurm": slurm.translate,
}


def translate(job: ResolvedJob, to: str) -> Translation:
    """Translate a job for one of `TARGETS`.

    Raises:
        Untranslatable: that system can't run it as it is.
    """
    return TARGETS[to](job)

"""A job in the words of other systems: what they are to be given so that they run it.

    vertex.py     Vertex AI           a CustomJob, as its REST API takes it
    ray.py        Ray                 the body of a job submission
    kubeflow.py   Kubeflow            a PyTorchJob, or a TFJob where there are parameter servers or evaluators
    slurm.py      Slurm               a script for sbatch

Each has one pure function, from a resolved job to a `Translation`: a document, and notes about what it couldn't take along
and what is still to be done. What can't be done without is refused (`common.py`), all of it at once.
"""

from __future__ import annotations

from collections.abc import Callable

from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.translate import kubeflow, ray, slurm, vertex
from footplate.jobs.translate.common import Translation, Untranslatable

__all__ = ["TARGETS", "Translation", "Untranslatable", "translate"]

TARGETS: dict[str, Callable[[ResolvedJob], Translation]] = {
    "vertex": vertex.translate,
    "ray": ray.translate,
    "kubeflow": kubeflow.translate,
    "slurm": slurm.translate,
}


def translate(job: ResolvedJob, to: str) -> Translation:
    """A job in the words of one of `TARGETS`.

    Raises:
        Untranslatable: that system can't run it as it is.
    """
    return TARGETS[to](job)

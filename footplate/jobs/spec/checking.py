"""Check the keys of a spec against each other, and its machines against the catalog.

Each check takes a job whose keys have the right types, and yields what is wrong. All of them run, so that all problems are
reported together.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from footplate.catalog.regions import check_region
from footplate.catalog.rows import catalog
from footplate.catalog.successors import what_became
from footplate.catalog.validity import check
from footplate.jobs.scheduling import MIN_WAIT_S
from footplate.jobs.spec.model import HyperparameterSpec, Job, ParameterSpec, TrainingInput
from footplate.jobs.spec.naming import seconds
from footplate.jobs.spec.problems import Path
from footplate.jobs.spec.scaling import ROLES, choice, config, count, key_of, machine_type, replicas, tier_of

_INPUT = "trainingInput"

Found = Iterator[tuple[Path, str]]


def problems(job: Job, partial: bool, machines_may_follow: bool = False) -> Found:
    """Return all problems of a job: for each, the key and a sentence.

    Args:
        job: a job whose keys have the right types.
        partial: keys that a submission needs may be missing.
        machines_may_follow: scale tier, machine types and images may be missing, too, since flags can still give them.
    """
    spec = job.training_input
    if not partial:
        yield from _needed(job)
    if not (machines_may_follow and spec.scale_tier is None and tier_of(spec) == "BASIC"):
        yield from _tier(spec, machines_may_follow)
    yield from _machines(spec)
    yield from _region(spec)
    yield from _containers(spec, machines_may_follow)
    yield from _scheduling(spec)
    if spec.hyperparameters:
        yield from _hyperparameters(spec.hyperparameters)


def notices(job: Job) -> list[str]:
    """Facts that are not problems: machines that no longer exist, and their successors."""
    spec = job.training_input
    texts = [what_became(replica.machine) for replica in replicas(spec)]
    if tier_of(spec) == "CUSTOM":
        for role in ROLES[1:]:
            if machine_type(spec, role) and not count(spec, role):
                texts.append(
                    f"{key_of(role, 'Type')} is given, but no {key_of(role, 'Count')}: there won't be such machines."
                )
    return [notice for notice in dict.fromkeys(texts) if notice]


def _needed(job: Job) -> Found:
    spec = job.training_input
    if job.job_id is None:
        yield ("jobId",), "missing: name the job."
    if spec.python_module is None and config(spec, "master").image_uri is None:
        yield (_INPUT, "pythonModule"), "missing. Give it with --module-name, or an image with --master-image-uri."


def _tier(spec: TrainingInput, machines_may_follow: bool) -> Found:
    tier = tier_of(spec)
    for role in ROLES:
        wanted = config(spec, role).accelerator_config
        if tier == "CUSTOM":
            name = machine_type(spec, role)
            if name is None and machines_may_follow:
                continue
            if name is None and (role == "master" or count(spec, role)):
                yield (_INPUT, key_of(role, "Type")), f"missing: give the machine type of the {role.replace('_', ' ')}."
            elif name is None and wanted:
                yield (_INPUT, key_of(role, "Config"), "acceleratorConfig"), f"without {key_of(role, 'Type')}."
            continue
        machines = {
            key_of(role, "Type"): machine_type(spec, role),
            key_of(role, "Count"): None if role == "master" else count(spec, role) or None,
        }
        for key, value in machines.items():
            if value is not None:
                text = f"scale tier {tier} determines the machines: leave this out, or use CUSTOM."
                yield (_INPUT, key), text
        if wanted:
            text = f"scale tier {tier} determines the accelerators: leave this out, or use CUSTOM."
            yield (_INPUT, key_of(role, "Config"), "acceleratorConfig"), text


def _machines(spec: TrainingInput) -> Found:
    if tier_of(spec) != "CUSTOM":
        return
    types = {role: name for role in ROLES if (name := machine_type(spec, role))}
    for role, name in types.items():
        wanted = config(spec, role).accelerator_config
        if wanted:
            verdict = check(catalog().machines[name], catalog().accelerators[wanted.type], wanted.count)
            if verdict.problem:
                yield (_INPUT, key_of(role, "Config"), "acceleratorConfig"), str(verdict)
    legacy = {role: catalog().machines[name].legacy for role, name in types.items() if name != "cloud_tpu"}
    if len(set(legacy.values())) > 1:
        other = next(role for role in legacy if legacy[role] != next(iter(legacy.values())))
        kinds = ", ".join(f"{types[role]} is {'legacy' if legacy[role] else 'of Compute Engine'}" for role in legacy)
        text = f"expected machine types that are all legacy, or all of Compute Engine: {kinds}."
        yield (_INPUT, key_of(other, "Type")), text


def _region(spec: TrainingInput) -> Found:
    if spec.region is None:
        return
    if tier_of(spec) == "CUSTOM":
        choices = [choice(spec, role) for role in ROLES if count(spec, role)]
    else:
        choices = [replica.machine for replica in replicas(spec)]
    accelerators = [machine.accelerator for machine in choices if machine and machine.accelerator]
    for text in check_region(spec.region, accelerators):
        yield (_INPUT, "region"), text


def _containers(spec: TrainingInput, image_may_follow: bool) -> Found:
    image = config(spec, "master").image_uri
    if image and spec.runtime_version:
        yield (_INPUT, "runtimeVersion"), "the image has its own: leave out runtimeVersion, or masterConfig.imageUri."
    for role in ROLES:
        own = config(spec, role)
        for key, value in (("containerCommand", own.container_command), ("containerArgs", own.container_args)):
            path = (_INPUT, key_of(role, "Config"), key)
            if value and not (own.image_uri or image or image_may_follow):
                yield path, "needs your own image: give imageUri."
            elif value and spec.args:
                yield path, "can't be given together with args: keep one of them."


def _scheduling(spec: TrainingInput) -> Found:
    waits = spec.scheduling.max_wait_time if spec.scheduling else None
    if waits and seconds(waits) < MIN_WAIT_S:
        yield (_INPUT, "scheduling", "maxWaitTime"), f"{waits}: expected at least {MIN_WAIT_S:g}s, half an hour."


def _hyperparameters(spec: HyperparameterSpec) -> Found:
    for key, number in (("maxTrials", spec.max_trials), ("maxParallelTrials", spec.max_parallel_trials)):
        if number < 1:
            yield (_INPUT, "hyperparameters", key), f"{number}: expected 1 or more."
    seen: set[str] = set()
    for index, parameter in enumerate(spec.params):
        path = (_INPUT, "hyperparameters", "params", index)
        if parameter.parameter_name in seen:
            yield (*path, "parameterName"), f'"{parameter.parameter_name}" is given twice.'
        seen.add(parameter.parameter_name)
        yield from _parameter(parameter, path)
        if spec.algorithm == "GRID_SEARCH" and parameter.type == "DOUBLE":
            yield (*path, "type"), "GRID_SEARCH takes no DOUBLE, which has no end of values: list them as DISCRETE."


def _parameter(parameter: ParameterSpec, path: Path) -> Found:
    if parameter.type in ("DOUBLE", "INTEGER"):
        low, high = parameter.min_value, parameter.max_value
        for key, value in (("minValue", low), ("maxValue", high)):
            if value is None:
                yield path, f"{key} is missing: a parameter of type {parameter.type} needs it."
            elif parameter.type == "INTEGER" and value != int(value):
                yield (*path, key), f"{value}: expected a whole number, as the parameter's type is INTEGER."
        if low is not None and high is not None and low > high:
            yield (*path, "maxValue"), f"{high:g} is less than minValue, {low:g}."
        elif low is not None and low <= 0 and parameter.scale_type in ("UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE"):
            yield (*path, "minValue"), f"{low:g}: {parameter.scale_type} needs a number above 0."
    if parameter.type == "CATEGORICAL" and not parameter.categorical_values:
        yield path, "categoricalValues is missing: a parameter of type CATEGORICAL needs it."
    if parameter.type == "DISCRETE":
        values = parameter.discrete_values or []
        if not values:
            yield path, "discreteValues is missing: a parameter of type DISCRETE needs it."
        if any(after <= before for before, after in pairwise(values)):
            yield (*path, "discreteValues"), "expected increasing values."

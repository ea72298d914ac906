"""What one key of a spec says about another, and what the catalog says about its machines.

Each check is a function from a job whose keys are all of the right type to what is wrong. They run all, so that all
problems are told at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from footplate.jobs.catalog.regions import check_region
from footplate.jobs.catalog.rows import catalog
from footplate.jobs.catalog.successors import what_became
from footplate.jobs.catalog.validity import check
from footplate.jobs.scheduling import MIN_WAIT_S
from footplate.jobs.spec.model import HyperparameterSpec, Job, ParameterSpec, TrainingInput
from footplate.jobs.spec.naming import seconds
from footplate.jobs.spec.problems import Path
from footplate.jobs.spec.scaling import ROLES, choice, config, count, key_of, machine_type, replicas, tier_of

_INPUT = "trainingInput"

Found = Iterator[tuple[Path, str]]


def problems(job: Job, partial: bool, machines_may_follow: bool = False) -> Found:
    """Everything that is wrong with a job: the key, and a sentence.

    Args:
        job: its keys are all of the right type.
        partial: keys that submitting needs may be missing.
        machines_may_follow: so may scale tier, machine types and images, which flags can still bring.
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
    """What is not wrong, but good to know: which machines can no longer be had, and what is there instead."""
    spec = job.training_input
    found = [what_became(one.machine) for one in replicas(spec)]
    if tier_of(spec) == "CUSTOM":
        for role in ROLES[1:]:
            if machine_type(spec, role) and not count(spec, role):
                found.append(f"{key_of(role, 'Type')} is given, but no {key_of(role, 'Count')}: there will be none.")
    return [one for one in dict.fromkeys(found) if one]


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
                yield (_INPUT, key_of(role, "Type")), f"missing: which machine is the {role.replace('_', ' ')}'s?"
            elif name is None and wanted:
                yield (_INPUT, key_of(role, "Config"), "acceleratorConfig"), f"without {key_of(role, 'Type')}."
            continue
        given = {
            key_of(role, "Type"): machine_type(spec, role),
            key_of(role, "Count"): None if role == "master" else count(spec, role) or None,
        }
        for key, value in given.items():
            if value is not None:
                yield (_INPUT, key), f"scale tier {tier} says which machines there are: leave this out, or use CUSTOM."
        if wanted:
            text = f"scale tier {tier} says which accelerators there are: leave this out, or use CUSTOM."
            yield (_INPUT, key_of(role, "Config"), "acceleratorConfig"), text


def _machines(spec: TrainingInput) -> Found:
    if tier_of(spec) != "CUSTOM":
        return
    named = {role: name for role in ROLES if (name := machine_type(spec, role))}
    for role, name in named.items():
        wanted = config(spec, role).accelerator_config
        if wanted:
            verdict = check(catalog().machines[name], catalog().accelerators[wanted.type], wanted.count)
            if verdict.problem:
                yield (_INPUT, key_of(role, "Config"), "acceleratorConfig"), str(verdict)
    legacy = {role: catalog().machines[name].legacy for role, name in named.items() if name != "cloud_tpu"}
    if len(set(legacy.values())) > 1:
        other = next(role for role in legacy if legacy[role] != next(iter(legacy.values())))
        kinds = ", ".join(f"{named[role]} is {'legacy' if legacy[role] else 'of Compute Engine'}" for role in legacy)
        text = f"machine types must be all legacy or all of Compute Engine: {kinds}."
        yield (_INPUT, key_of(other, "Type")), text


def _region(spec: TrainingInput) -> Found:
    if spec.region is None:
        return
    if tier_of(spec) == "CUSTOM":
        choices = [choice(spec, role) for role in ROLES if count(spec, role)]
    else:
        choices = [one.machine for one in replicas(spec)]
    accelerators = [one.accelerator for one in choices if one and one.accelerator]
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
                yield path, "needs an image of your own: give imageUri."
            elif value and spec.args:
                yield path, "can't be given together with args: keep one of them."


def _scheduling(spec: TrainingInput) -> Found:
    waits = spec.scheduling.max_wait_time if spec.scheduling else None
    if waits and seconds(waits) < MIN_WAIT_S:
        yield (_INPUT, "scheduling", "maxWaitTime"), f"{waits}: expected at least {MIN_WAIT_S:g}s, half an hour."


def _hyperparameters(spec: HyperparameterSpec) -> Found:
    seen: set[str] = set()
    for index, one in enumerate(spec.params):
        path = (_INPUT, "hyperparameters", "params", index)
        if one.parameter_name in seen:
            yield (*path, "parameterName"), f'"{one.parameter_name}" is there twice.'
        seen.add(one.parameter_name)
        yield from _parameter(one, path)


def _parameter(one: ParameterSpec, path: Path) -> Found:
    if one.type in ("DOUBLE", "INTEGER"):
        low, high = one.min_value, one.max_value
        for key, value in (("minValue", low), ("maxValue", high)):
            if value is None:
                yield path, f"{key} is missing: a parameter of type {one.type} needs it."
            elif one.type == "INTEGER" and value != int(value):
                yield (*path, key), f"{value}: expected a whole number, as the parameter's type is INTEGER."
        if low is not None and high is not None and low > high:
            yield (*path, "maxValue"), f"{high:g} is less than minValue, {low:g}."
    if one.type == "CATEGORICAL" and not one.categorical_values:
        yield path, "categoricalValues is missing: a parameter of type CATEGORICAL needs it."
    if one.type == "DISCRETE":
        values = one.discrete_values or []
        if not values:
            yield path, "discreteValues is missing: a parameter of type DISCRETE needs it."
        if any(after <= before for before, after in pairwise(values)):
            yield (*path, "discreteValues"), "expected increasing values."

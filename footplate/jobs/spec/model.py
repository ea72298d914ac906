"""Which keys a job has, and of what type: AI Platform Training's `Job` and `TrainingInput`, strictly.

Keys are spelt as in config.yaml (camelCase); in Python they are fields (snake_case). An unknown key is a problem. What one
key says about another is not checked here but in checking.py, so that both kinds of problems can be told at once.

The keys are those of the service's public description, version 1 of its API (ml.googleapis.com), as of 2024.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

from footplate.errors import did_you_mean
from footplate.extras import require
from footplate.jobs.catalog.lookup import find_accelerator, find_machine
from footplate.jobs.spec import naming
from footplate.jobs.spec.problems import Path
from footplate.jobs.spec.yamlfile import Scalar

if not TYPE_CHECKING:
    require("pydantic", "jobs", "A job's specification")

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

MAX_REPLICAS = 10_000


def _mistake(expected: str, value: Any) -> PydanticCustomError:
    shown = value.text if isinstance(value, Scalar) else value
    said = f'"{shown[:60]}"' if isinstance(shown, str) else "nothing" if shown is None else f"a {_kind(shown)}"
    return PydanticCustomError("mistake", "{text}", {"text": f"{said}: {expected}."})


def _kind(value: Any) -> str:
    return {dict: "mapping", list: "list"}.get(type(value), type(value).__name__)


def _text(form: Callable[[str], str]) -> BeforeValidator:
    """Text in a certain form; a number stands for the text that it was written as."""

    def read(value: Any) -> str:
        given = value.text if isinstance(value, Scalar) else value
        if not isinstance(given, str):
            raise _mistake("expected text", value)
        try:
            return form(given)
        except ValueError as error:  # a ConfigError, which is one, comes from the catalog and names the value itself
            text = f"{error}"
            if not text.startswith('"'):
                raise _mistake(text, given) from None
            raise PydanticCustomError("mistake", "{text}", {"text": text}) from None

    return BeforeValidator(read)


def _whole(low: int, high: int) -> BeforeValidator:
    """A whole number; JSON writes those of 64 bits as text."""

    def read(value: Any) -> int:
        given = value.value if isinstance(value, Scalar) else value
        if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 20:
            given = int(given)
        if not isinstance(given, int) or isinstance(given, bool) or not low <= given <= high:
            raise _mistake(f"expected a whole number from {low} to {high}", value)
        return given

    return BeforeValidator(read)


def _real(value: Any) -> float:
    """A number, also in the forms that YAML takes for text, such as `1e-3`."""
    given = value.value if isinstance(value, Scalar) else value
    if isinstance(given, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", given[:100], re.ASCII):
        given = float(given)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or abs(given) > 1e300 or math.isnan(given):
        raise _mistake("expected a number", value)
    return float(given)


def _truth(value: Any) -> bool:
    given = value.value if isinstance(value, Scalar) else value
    if not isinstance(given, bool):
        raise _mistake("expected true or false", value)
    return given


def _one_of(*choices: str) -> BeforeValidator:
    """One of the API's constants; case and dashes don't matter, as with gcloud's flags."""

    def read(value: Any) -> str:
        given = value.text if isinstance(value, Scalar) else value
        plain = given.upper().replace("-", "_") if isinstance(given, str) else given
        if plain not in choices:
            near = did_you_mean(str(plain)[:60], choices) if isinstance(plain, str) else f"There are: {choices}."
            raise _mistake(f"not one of the choices. {near.removesuffix('.')}", value)
        return plain

    return BeforeValidator(read)


def _machine(name: str) -> str:
    return find_machine(name).name


def _accelerator(name: str) -> str:
    return find_accelerator(name).name


Argument = Annotated[str, _text(naming.argument)]
Plain = Annotated[str, _text(naming.plain)]
Module = Annotated[str, _text(naming.module)]
Location = Annotated[str, _text(naming.location)]
Package = Annotated[str, _text(naming.package)]
Image = Annotated[str, _text(naming.image)]
Version = Annotated[str, _text(naming.version)]
Duration = Annotated[str, _text(naming.duration)]
JobName = Annotated[str, _text(naming.job_name)]
MachineName = Annotated[str, _text(_machine)]
AcceleratorName = Annotated[str, _text(_accelerator)]
Count = Annotated[int, _whole(0, MAX_REPLICAS)]
Trials = Annotated[int, _whole(0, 1_000_000)]
Real = Annotated[float, BeforeValidator(_real)]
Truth = Annotated[bool, BeforeValidator(_truth)]


class Strict(BaseModel):
    """A mapping of the spec: it has these keys and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel)


class AcceleratorConfig(Strict):
    """Which accelerators a machine gets beside what is built in, and how many."""

    count: Annotated[int, _whole(1, 1024)]
    type: AcceleratorName


class DiskConfig(Strict):
    """The boot disk."""

    boot_disk_type: Plain | None = None
    boot_disk_size_gb: Annotated[int, _whole(1, 65536)] | None = None


class ReplicaConfig(Strict):
    """What the machines of a role have beside their type."""

    accelerator_config: AcceleratorConfig | None = None
    image_uri: Image | None = None
    tpu_tf_version: Version | None = None
    disk_config: DiskConfig | None = None
    container_command: list[Argument] | None = None
    container_args: list[Argument] | None = None


class Scheduling(Strict):
    """How long a job may run and wait, and how soon it is its turn."""

    max_running_time: Duration | None = None
    max_wait_time: Duration | None = None
    priority: Annotated[int, _whole(0, 1000)] | None = None


class EncryptionConfig(Strict):
    """The key with which a cloud encrypts what the job leaves."""

    kms_key_name: Plain


class ParameterSpec(Strict):
    """One hyperparameter that is to be tuned."""

    parameter_name: Plain
    type: Annotated[str, _one_of("DOUBLE", "INTEGER", "CATEGORICAL", "DISCRETE")]
    min_value: Real | None = None
    max_value: Real | None = None
    categorical_values: list[Argument] | None = None
    discrete_values: list[Real] | None = None
    scale_type: (
        Annotated[str, _one_of("NONE", "UNIT_LINEAR_SCALE", "UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE")] | None
    ) = None


class HyperparameterSpec(Strict):
    """What is tuned, for what, and how often."""

    goal: Annotated[str, _one_of("MAXIMIZE", "MINIMIZE")]
    params: Annotated[list[ParameterSpec], Field(min_length=1, max_length=100)]
    max_trials: Trials = 1
    max_parallel_trials: Trials = 1
    max_failed_trials: Trials = 0
    hyperparameter_metric_tag: Plain | None = None
    resume_previous_job_id: JobName | None = None
    enable_trial_early_stopping: Truth | None = None
    algorithm: Annotated[str, _one_of("ALGORITHM_UNSPECIFIED", "GRID_SEARCH", "RANDOM_SEARCH")] | None = None


TIERS = ("BASIC", "STANDARD_1", "PREMIUM_1", "BASIC_GPU", "BASIC_TPU", "CUSTOM")


class TrainingInput(Strict):
    """The job itself."""

    scale_tier: Annotated[str, _one_of(*TIERS)] | None = None
    master_type: MachineName | None = None
    master_config: ReplicaConfig | None = None
    worker_count: Count | None = None
    worker_type: MachineName | None = None
    worker_config: ReplicaConfig | None = None
    parameter_server_count: Count | None = None
    parameter_server_type: MachineName | None = None
    parameter_server_config: ReplicaConfig | None = None
    evaluator_count: Count | None = None
    evaluator_type: MachineName | None = None
    evaluator_config: ReplicaConfig | None = None
    package_uris: Annotated[list[Package], Field(max_length=100)] | None = None
    python_module: Module | None = None
    args: list[Argument] | None = None
    hyperparameters: HyperparameterSpec | None = None
    region: Plain | None = None
    job_dir: Location | None = None
    runtime_version: Version | None = None
    python_version: Version | None = None
    scheduling: Scheduling | None = None
    use_chief_in_tf_config: Truth | None = None
    network: Plain | None = None
    service_account: Plain | None = None
    encryption_config: EncryptionConfig | None = None
    enable_web_access: Truth | None = None


class Job(Strict):
    """A job: what config.yaml holds."""

    job_id: JobName | None = None
    labels: (
        Annotated[
            dict[Annotated[str, _text(naming.label_key)], Annotated[str, _text(naming.label_value)]],
            Field(max_length=64),
        ]
        | None
    ) = None
    training_input: TrainingInput = Field(default_factory=TrainingInput)


def keys_of(path: Iterable[str | int]) -> list[str]:
    """The keys of the mapping that a path leads to, for naming the nearest; empty when it leads to none."""
    kind: Any = Job
    for part in path:
        if isinstance(part, int):
            continue
        fields = {one.alias: one for one in kind.model_fields.values()} if _is_model(kind) else {}
        kind = _model_in(fields[part].annotation) if part in fields else None
    return [str(one.alias) for one in kind.model_fields.values()] if _is_model(kind) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _model_in(hint: Any) -> Any:
    """The model that a type is, is a list of, or may be."""
    if _is_model(hint):
        return hint
    return next((found for one in getattr(hint, "__args__", ()) if (found := _model_in(one))), None)


def mistakes(error: ValidationError) -> list[tuple[Path, str]]:
    """Each mistake that pydantic found: its path, and what is wrong in our words."""
    return [(_path(found["loc"]), _explain(found)) for found in error.errors(include_url=False)]


def _path(loc: tuple[int | str, ...]) -> Path:
    """The path of a mistake; a label's bad name has one more part, which is no key."""
    return tuple(part for part in loc if part != "[key]")


def _explain(found: Any) -> str:
    path, kind, context = _path(found["loc"]), found["type"], found.get("ctx", {})
    if kind == "mistake":
        return str(context["text"])
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "missing":
        return "missing."
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "expected keys with values below it."
    if kind == "list_type":
        return "expected a list: each item on a line of its own after a dash, or [a, b]."
    if kind == "too_long":
        return f"at most {context['max_length']} are taken."
    if kind == "too_short":
        return f"at least {context['min_length']} is needed."
    return f"{found['msg']}."


def _unknown(path: Path) -> str:
    key, home = str(path[-1]), path[:-1]
    known = keys_of(home)
    other = {"trainingInput": (), "": ("trainingInput",)}.get(".".join(map(str, home)))
    if other is not None and key in keys_of(other):
        return f"belongs {'under ' + other[0] if other else 'at the top, beside trainingInput'}, not here."
    hint = did_you_mean(key[:60], known)
    return f"there is no such key. {hint.partition('? ')[0]}?" if "? " in hint else f"there is no such key. {hint}"

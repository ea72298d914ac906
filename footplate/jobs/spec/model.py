"""The keys of a job and their types: AI Platform Training's `Job` and `TrainingInput`, read strictly.

Keys have config.yaml's spelling (camelCase), and are fields in Python (snake_case). An unknown key is a problem. Checks of
keys against each other are in checking.py, so that both kinds of problems are reported together.

The keys are from the service's public description, version 1 of its API (ml.googleapis.com), as of 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from footplate.jobs.spec import naming
from footplate.jobs.spec.fields import (
    AcceleratorName,
    Argument,
    Count,
    Duration,
    Image,
    JobName,
    Location,
    MachineName,
    Module,
    Package,
    Plain,
    Real,
    Trials,
    Truth,
    Version,
    one_of,
    text,
    whole,
)
from footplate.jobs.spec.reading import Size


@dataclass(frozen=True)
class AcceleratorConfig:
    """Accelerators that a machine gets besides its built-in ones."""

    count: Annotated[int, whole(1, 1024)]
    type: AcceleratorName


@dataclass(frozen=True)
class DiskConfig:
    """The boot disk."""

    boot_disk_type: Plain | None = None
    boot_disk_size_gb: Annotated[int, whole(1, 65536)] | None = None


@dataclass(frozen=True)
class ReplicaConfig:
    """Settings of a role's machines, besides their type."""

    accelerator_config: AcceleratorConfig | None = None
    image_uri: Image | None = None
    tpu_tf_version: Version | None = None
    disk_config: DiskConfig | None = None
    container_command: list[Argument] | None = None
    container_args: list[Argument] | None = None


@dataclass(frozen=True)
class Scheduling:
    """Limits for a job's running and waiting time, and its priority."""

    max_running_time: Duration | None = None
    max_wait_time: Duration | None = None
    priority: Annotated[int, whole(0, 1000)] | None = None


@dataclass(frozen=True)
class EncryptionConfig:
    """The key with which a cloud encrypts the job's data."""

    kms_key_name: Plain


@dataclass(frozen=True)
class ParameterSpec:
    """A hyperparameter to tune."""

    parameter_name: Plain
    type: Annotated[str, one_of("DOUBLE", "INTEGER", "CATEGORICAL", "DISCRETE")]
    min_value: Real | None = None
    max_value: Real | None = None
    categorical_values: list[Argument] | None = None
    discrete_values: list[Real] | None = None
    scale_type: (
        Annotated[str, one_of("NONE", "UNIT_LINEAR_SCALE", "UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE")] | None
    ) = None


@dataclass(frozen=True)
class HyperparameterSpec:
    """Hyperparameter tuning: parameters, goal, number of trials."""

    goal: Annotated[str, one_of("MAXIMIZE", "MINIMIZE")]
    params: Annotated[list[ParameterSpec], Size(1, 100)]
    max_trials: Trials = 1
    max_parallel_trials: Trials = 1
    max_failed_trials: Trials = 0
    hyperparameter_metric_tag: Plain | None = None
    resume_previous_job_id: JobName | None = None
    enable_trial_early_stopping: Truth | None = None
    algorithm: Annotated[str, one_of("ALGORITHM_UNSPECIFIED", "GRID_SEARCH", "RANDOM_SEARCH")] | None = None


TIERS = ("BASIC", "STANDARD_1", "PREMIUM_1", "BASIC_GPU", "BASIC_TPU", "CUSTOM")


@dataclass(frozen=True)
class TrainingInput:
    """The training: its cluster, program and limits."""

    scale_tier: Annotated[str, one_of(*TIERS)] | None = None
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
    package_uris: Annotated[list[Package], Size(most=100)] | None = None
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


@dataclass(frozen=True)
class Job:
    """The contents of a config.yaml."""

    job_id: JobName | None = None
    labels: (
        Annotated[
            dict[Annotated[str, text(naming.label_key)], Annotated[str, text(naming.label_value)]],
            Size(most=64),
        ]
        | None
    ) = None
    training_input: TrainingInput = field(default_factory=TrainingInput)

"""Flags as part of a spec: `--master-accelerator count=4,type=nvidia-tesla-k80` sets `masterConfig.acceleratorConfig`.

The flags are those of `gcloud ai-platform jobs submit training`. `KEYS` maps each to its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from footplate.core.errors import ConfigError
from footplate.jobs.spec.problems import Path

_ROLES = {"master": "master", "worker": "worker", "parameter-server": "parameterServer", "evaluator": "evaluator"}

KEYS: dict[str, Path] = {
    "scale-tier": ("trainingInput", "scaleTier"),
    "module-name": ("trainingInput", "pythonModule"),
    "packages": ("trainingInput", "packageUris"),
    "job-dir": ("trainingInput", "jobDir"),
    "region": ("trainingInput", "region"),
    "runtime-version": ("trainingInput", "runtimeVersion"),
    "python-version": ("trainingInput", "pythonVersion"),
    "max-running-time": ("trainingInput", "scheduling", "maxRunningTime"),
    "max-wait-time": ("trainingInput", "scheduling", "maxWaitTime"),
    "priority": ("trainingInput", "scheduling", "priority"),
    "use-chief-in-tf-config": ("trainingInput", "useChiefInTfConfig"),
    "network": ("trainingInput", "network"),
    "service-account": ("trainingInput", "serviceAccount"),
    "labels": ("labels",),
    **{f"{flag}-machine-type": ("trainingInput", f"{role}Type") for flag, role in _ROLES.items()},
    **{f"{flag}-count": ("trainingInput", f"{role}Count") for flag, role in _ROLES.items() if flag != "master"},
    **{f"{flag}-accelerator": ("trainingInput", f"{role}Config", "acceleratorConfig") for flag, role in _ROLES.items()},
    **{f"{flag}-image-uri": ("trainingInput", f"{role}Config", "imageUri") for flag, role in _ROLES.items()},
}
"""The key that each flag sets. A flag that is missing here is about the submission, not about the job."""

ALIASES = {"worker-server-count": "worker-count"}
"""Older spellings of flags, which tutorials still use."""


OF_GCLOUD = (
    "enable-web-access", "kms-key", "kms-keyring", "kms-location", "kms-project", "quiet",
    "tpu-tf-version", "verbosity",
)  # fmt: skip
"""Flags of gcloud that Footplate doesn't have. They are refused, not passed to the program."""


def to_values(options: Mapping[str, str]) -> tuple[dict[Path, Any], dict[Path, str]]:
    """Convert flags to keys: their values, and the flag of each. Each label is a key of its own, next to the file's labels.

    Args:
        options: flags of `KEYS` without their dashes, and their values.

    Raises:
        ConfigError: `--labels` or an accelerator flag has a wrong form.
    """
    values: dict[Path, Any] = {}
    origins: dict[Path, str] = {}
    for flag, text in options.items():
        value = _value(flag, text)
        each = {(*KEYS[flag], key): item for key, item in value.items()} if flag == "labels" else {KEYS[flag]: value}
        values |= each
        origins |= dict.fromkeys(each, f"--{flag}")
    return values, origins


def pairs(flag: str, text: str) -> dict[str, str]:
    """Parse `a=1,b=2`.

    Raises:
        ConfigError: the text has another form, or a key twice.
    """
    mapping: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f'--{flag} {text}: expected KEY=VALUE, separated by commas; found "{part}".')
        if key.strip() in mapping:
            raise ConfigError(f'--{flag} {text}: "{key.strip()}" is given twice.')
        mapping[key.strip()] = value.strip()
    return mapping


def accelerator(flag: str, text: str) -> dict[str, str]:
    """Parse `count=4,type=nvidia-tesla-k80`, in either order. The default count is 1.

    Raises:
        ConfigError: the text has another form.
    """
    mapping = pairs(flag, text)
    if "type" not in mapping or set(mapping) - {"type", "count"}:
        raise ConfigError(f"--{flag} {text}: expected count=COUNT,type=TYPE, such as count=4,type=nvidia-tesla-t4.")
    return {"count": "1", **mapping}


def _value(flag: str, text: str) -> Any:
    if flag == "labels":
        return pairs(flag, text)
    if flag == "packages":
        return [part.strip() for part in text.split(",")]
    if flag.endswith("-accelerator"):
        return accelerator(flag, text)
    if flag == "use-chief-in-tf-config" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return text

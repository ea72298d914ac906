"""Installed packages and their versions, from their metadata, without importing them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

# Required packages with the oldest version that works, as in pyproject.toml.
REQUIRED = {
    "torch": "2.11",
    "numpy": "1.26",
    "pyarrow": "16",
    "deltalake": "1.0",
    "rich": "13",
    "psutil": "5.9",
    "nvidia-ml-py": "12",
    "jsonargparse": "4.53",
}


@dataclass(frozen=True)
class Extra:
    """An optional feature: its extra, package and module, and its purpose."""

    name: str
    package: str
    module: str
    purpose: str


EXTRAS = (
    Extra("images", "opencv-python-headless", "cv2", "decoding image columns"),
    Extra("mlflow", "mlflow", "mlflow", "tracking with MLflow"),
    Extra("tensorboard", "tensorboard", "tensorboard", "logging to TensorBoard"),
    Extra("wandb", "wandb", "wandb", "logging to W&B"),
    Extra("trackio", "trackio", "trackio", "logging to Trackio"),
    Extra("plot", "matplotlib", "matplotlib", "drawing curves"),
    Extra("report", "plotly", "plotly", "reports of runs"),
    Extra("lightning", "lightning", "lightning", "running Lightning's modules and callbacks"),
    Extra("petastorm", "pandas", "pandas", "code written for Petastorm"),
)


@dataclass(frozen=True)
class Package:
    """A package that may be installed.

    Attributes:
        name: its name on the package index.
        version: what is installed; None when it isn't, "unknown" when only its module can be found.
        purpose: the package's purpose.
        install: the command that installs it, or brings it up to date.
        problem: why it can't serve as it is, and what to do; None when it can. Only required packages have problems.
    """

    name: str
    version: str | None
    purpose: str
    install: str
    problem: str | None = None


def required_packages() -> tuple[Package, ...]:
    """Return the packages that all training needs."""
    return tuple(_required(name, oldest, installed_version(name)) for name, oldest in REQUIRED.items())


def optional_packages() -> tuple[Package, ...]:
    """Return the packages of Footplate's extras."""
    return tuple(
        Package(
            name=extra.package,
            version=installed_version(extra.package) or ("unknown" if find_spec(extra.module) else None),
            purpose=extra.purpose,
            install=f'pip install "footplate[{extra.name}]"',
        )
        for extra in EXTRAS
    )


def installed_version(package: str) -> str | None:
    """Return the version of a package. None if it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_older(version_text: str, oldest: str) -> bool:
    """Return True if a version such as "2.13.0+cpu" is older than one such as "2.11"."""
    return _numbers(version_text) < _numbers(oldest)


def _required(name: str, oldest: str, installed: str | None) -> Package:
    install = f'pip install "{name}>={oldest}"'
    problem = None
    if installed is None:
        problem = f"{name} is not installed, but all training needs it: {install}"
    elif is_older(installed, oldest):
        problem = f"{name} {installed} is older than {oldest}, the oldest that Footplate works with: {install}"
    return Package(name, installed, "required", install, problem)


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in re.findall(r"\d+", text.partition("+")[0])]
    return [*numbers, 0, 0, 0][:3]

"""The public names: those that public packages export, and a few names of other modules.

A module with `__all__` is in `PACKAGES` or in `INTERNAL`. A name that several packages export belongs to the first of them.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "footplate",
    "footplate.callbacks",
    "footplate.tracking",
    "footplate.data",
    "footplate.launch",
    "footplate.scaling",
    "footplate.catalog",
    "footplate.lab",
    "footplate.compat.lightning",
    "footplate.compat.horovod",
    "footplate.compat.horovod.elastic",
    "footplate.compat.petastorm",
    "footplate.compat.estimator",
)
# Modules that also have names of their own use.
OTHERS = {
    "footplate.launch.worker": ("attempt", "inside", "kept", "log_to_driver", "progressed", "saved", "slot"),
    "footplate.compat.lightning.cli": ("LightningCLI",),
    "footplate.jobs.operations": ("Jobs",),
    "footplate.jobs.states": ("State",),
    "footplate.jobs.tuning.results": ("Tuning",),
}
# They export names to Footplate's own modules.
INTERNAL = {
    "footplate.checkpoint",
    "footplate.checkpoint.storage",
    "footplate.core.goodput",
    "footplate.jobs.package",
    "footplate.jobs.translate",
    "footplate.step.xla.capture",
    "footplate.step.xla.capture.torch_tracing",
    "footplate.step.xla.lowering",
    "footplate.training.preemption",
}
# Public values that are neither classes nor functions, and can have no docstring when a program runs.
CONSTANTS = {
    "footplate.__version__",
    "footplate.tracking.Status",
    "footplate.compat.horovod.global_process_set",
    *(f"footplate.compat.horovod.{op}" for op in ("Average", "Sum", "Adasum", "Min", "Max", "Product")),
}


def public_names() -> list[str]:
    """The full names, sorted."""
    public: dict[str, Any] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            again = any(known is value and full.endswith(f".{name}") for full, known in public.items())
            if not again and not isinstance(value, ModuleType):
                public[f"{package}.{name}"] = value
    return sorted([*public, *(f"{module}.{name}" for module, names in OTHERS.items() for name in names)])


def value_of(name: str) -> Any:
    """The class, function or constant of a full name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def exporting_modules() -> set[str]:
    """The modules of Footplate that have an `__all__`."""
    return {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in (ROOT / "footplate").rglob("*.py")
        if re.search("^__all__ =", path.read_text(), re.MULTILINE)
    }

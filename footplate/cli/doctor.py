"""`footplate doctor`: what this machine can train on, and what it lacks. Exit code 1 when nothing can train here.

It answers even where torch can't be imported: that is when a doctor is needed most.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from footplate.core.version import __version__

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def parser(name: str) -> ArgumentParser:
    """The parser of `doctor`."""
    from footplate.cli.parsing import make_parser

    made = make_parser(name, "Show the machine, its accelerators and packages, and why what can't be used can't be.")
    made.add_argument("--json", action="store_true", help="print the findings as JSON")
    return made


def run(name: str, argv: Sequence[str]) -> int:
    """Examine this machine; returns 0 when it can train, else 1."""
    from footplate.cli.parsing import parse

    given = parse(parser(name), argv)
    try:
        import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except Exception as error:  # a broken installation raises ImportError, OSError, RuntimeError, …
        findings = _without_torch(error)
        print(json.dumps(findings, indent=2) if given.json else _as_text(findings))
        return 1
    from footplate.cli.show import show
    from footplate.hardware import doctor

    report = doctor.examine()
    if given.json:
        print(json.dumps(doctor.to_dict(report), indent=2, default=str))
    else:
        show(doctor.render(report))
    return 0 if report.ok else 1


def _without_torch(error: Exception) -> dict[str, Any]:
    """What can be said of a machine on which torch can't be imported."""
    from footplate.hardware.machine import examine_machine
    from footplate.hardware.packages import optional_packages, required_packages
    from footplate.hardware.tpu.report import examine_tpu

    packages = required_packages()
    said = f"{type(error).__name__}: {error}"
    broken = f"torch can't be imported ({said}). Install it again: pip install --force-reinstall torch"
    absent = any(package.name == "torch" and package.version is None for package in packages)
    return {
        "ok": False,
        "footplate": __version__,
        "python": platform.python_version(),
        "machine": asdict(examine_machine()),
        "packages": [asdict(package) for package in packages],
        "extras": [asdict(package) for package in optional_packages()],
        "accelerators": [],
        "tpu": dict(examine_tpu(os.environ, chips=0).facts),
        "problems": [*([] if absent else [broken]), *(package.problem for package in packages if package.problem)],
        "advice": [],
    }


def _as_text(findings: dict[str, Any]) -> str:
    installed = [f"  {package['name']} {package['version'] or 'not installed'}" for package in findings["packages"]]
    return "\n".join(
        [
            f"footplate {findings['footplate']}, Python {findings['python']}, {findings['machine']['system']}",
            *installed,
            *(f"problem: {problem}" for problem in findings["problems"]),
            "Training can't work here until the problems are solved.",
        ]
    )

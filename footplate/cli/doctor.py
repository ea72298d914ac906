"""`footplate doctor`: show the accelerators and packages of this machine, and their problems.

The exit code is 1 if nothing can train here. The command also works where torch can't be imported, and shows why.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.formats import add_format, show_as
from footplate.core.version import __version__


def parser(name: str) -> Parser:
    """Make the parser of `doctor`."""
    parser = make_parser(
        name, "Show the machine, its accelerators and packages, and the reason for each that can't be used."
    )
    add_format(parser)
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Examine this machine; returns 0 if it can train, else 1."""
    args = parser(name).parse_args(argv)

    # A broken installation raises ImportError, OSError, RuntimeError, …
    try:
        import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except Exception as error:
        findings = _without_torch(error)
        show_as(args.format, findings, lambda: _as_text(findings))
        return 1

    from footplate.hardware import doctor
    from footplate.hardware.doctor_page import page

    report = doctor.examine()
    show_as(args.format, doctor.to_dict(report), lambda: page(report))
    return 0 if report.ok else 1


def _without_torch(error: Exception) -> dict[str, Any]:
    """Collect the findings that need no torch."""
    from footplate.hardware.machine import examine_machine
    from footplate.hardware.packages import optional_packages, required_packages
    from footplate.hardware.tpu.report import examine_tpu

    packages = required_packages()
    reason = f"{type(error).__name__}: {error}"
    broken = f"torch can't be imported ({reason}). Install it again: pip install --force-reinstall torch"

    # If torch isn't installed at all, its package has a problem of its own, which says so.
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
            "Training can't work here until these problems are solved.",
        ]
    )

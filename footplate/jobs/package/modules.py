"""Whether there is a package, and whether it has the module that is to run: said before a job is submitted.

Both look at names alone. Whether the module can be imported is known when the job runs.
"""

from __future__ import annotations

from pathlib import Path

from footplate.errors import PackageError
from footplate.jobs.package.taking import SOURCE, Snapshot


def no_package(path: Path) -> str:
    """Why a directory is no package, in a sentence; empty when it is one."""
    there = _is_file(path / "__init__.py")
    return "" if there else f"{str(path)!r} is no package: expected a directory with an __init__.py."


def no_module(package: Path | Snapshot, module: str) -> str:
    """That a package, its directory or what was taken of it, lacks a module; empty when it has it, or another one may."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return ""  # no module at all, of which the spec tells
    stem = "/".join(parts)
    names = [f"{stem}/__main__.py"] if len(parts) == 1 else [f"{stem}.py", f"{stem}/__main__.py"]
    if isinstance(package, Path):
        home = package.resolve()
        inside, there = home.name == parts[0], any(_is_file(home.parent / name) for name in names)
    else:
        taken = {name for name, _ in package.files}
        inside = any(name.startswith(f"{SOURCE}/{parts[0]}/") for name in taken)
        there = any(f"{SOURCE}/{name}" in taken for name in names)
    return f"the package has no module {module}: expected {names[0]}." if inside and not there else ""


def check_module(package: Snapshot, module: str | None) -> None:
    """See that a program that was taken has the module that is to run; `.gitignore` may have left it out.

    Raises:
        PackageError: it hasn't.
    """
    if module is not None and (text := no_module(package, module)):
        raise PackageError(" ".join((text, *package.warnings)))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, a NUL in it, a directory that isn't ours to look into
        return False

"""Whether there is a package, and whether it has the module that is to run: said before a job is submitted.

`take_program` decides what a submission accepts. A dry run calls the same function, so it accepts nothing else. All checks
look at names alone. Whether the module can be imported is known when the job runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from footplate.core.errors import PackageError
from footplate.jobs.package.files import by_own_name
from footplate.jobs.package.snapshots import SOURCE, Snapshot, snapshot, stored


def take_program(package: Path | Snapshot | None, packages: Sequence[str], module: str | None, home: Path) -> Snapshot:
    """Take a job's program as it is now, and check that it has the module that is to run.

    Args:
        package: the directory of its package, or one that was taken; None if `packages`, or images, bring it.
        packages: wheels and source distributions: paths, or URIs of gs:// and s3://.
        module: the module that is to run; None when an image has its own program.
        home: the directory in which a package that is taken now is kept.

    Raises:
        PackageError: it can't be taken, or lacks the module; it was taken, and deleted since.
    """
    if isinstance(package, Snapshot):
        taken = stored(package.digest, package.path.parents[1])
    else:
        taken = snapshot(package, packages, home)
    if module is not None and (text := module_problem(taken, module)):  # .gitignore may have left it out
        raise PackageError(" ".join((text, *taken.warnings)))
    return taken


def package_problem(path: Path) -> str:
    """Why a directory is no package, in a sentence; empty when it is one."""
    there = _is_file(path / "__init__.py")
    return "" if there else f"{str(path)!r} is no package: expected a directory with an __init__.py."


def module_problem(package: Path | Snapshot, module: str) -> str:
    """That a package, its directory or what was taken of it, lacks a module; empty when it has it, or another one may."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return ""  # no module at all, of which the spec tells
    stem = "/".join(parts)
    names = [f"{stem}/__main__.py"] if len(parts) == 1 else [f"{stem}.py", f"{stem}/__main__.py"]
    if isinstance(package, Path):
        package, real = by_own_name(package), package.resolve()
        if package.name != parts[0] == real.name:
            other = ".".join((package.name, *parts[1:]))
            return (
                f"the package is called {package.name}, by the name of a link. Use {other}, or --package-path {real}."
            )
        inside, there = package.name == parts[0], any(_is_file(package.parent / name) for name in names)
    else:
        taken = {name for name, _ in package.files}
        inside = any(name.startswith(f"{SOURCE}/{parts[0]}/") for name in taken)
        there = any(f"{SOURCE}/{name}" in taken for name in names)
    return f"the package has no module {module}: expected {names[0]}." if inside and not there else ""


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, a NUL in it, a directory that isn't ours to look into
        return False

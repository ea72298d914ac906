"""Check, before a submission, that the package exists and has the module to run.

`take_program` makes the snapshot of a submission, and of a dry run. The checks look at file names only. Only the running
job shows if the module can be imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from footplate.core.errors import PackageError
from footplate.jobs.package.files import by_own_name
from footplate.jobs.package.snapshots import SOURCE, Snapshot, snapshot, stored


def take_program(package: Path | Snapshot | None, packages: Sequence[str], module: str | None, home: Path) -> Snapshot:
    """Make a snapshot of a job's program, and check that it has the module to run.

    Args:
        package: the directory of the package, or a snapshot; None if `packages` or images bring the program.
        packages: wheels and source distributions: paths, or URIs of gs:// and s3://.
        module: the module to run; None if an image has its own program.
        home: the folder that keeps the snapshot.

    Raises:
        PackageError: the snapshot can't be made, or was deleted meanwhile, or lacks the module.
    """
    if isinstance(package, Snapshot):
        program = stored(package.digest, package.path.parents[1])
    else:
        program = snapshot(package, packages, home)
    # The directory may have the module although the snapshot lacks it, because of .gitignore.
    if module is not None and (text := module_problem(program, module)):
        raise PackageError(" ".join((text, *program.warnings)))
    return program


def package_problem(path: Path) -> str:
    """Explain why a directory isn't a package; empty if it is one."""
    is_package = _is_file(path / "__init__.py")
    return "" if is_package else f"{str(path)!r} isn't a package: expected a directory with an __init__.py."


def module_problem(package: Path | Snapshot, module: str) -> str:
    """Explain that a package lacks a module; empty if it has the module, or if another package may have it."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        # This isn't the name of a module. The spec's checks report it.
        return ""
    stem = "/".join(parts)
    names = [f"{stem}/__main__.py"] if len(parts) == 1 else [f"{stem}.py", f"{stem}/__main__.py"]
    if isinstance(package, Path):
        package, real = by_own_name(package), package.resolve()
        if package.name != parts[0] == real.name:
            other = ".".join((package.name, *parts[1:]))
            return f"the package's name is {package.name}, from a link. Use {other}, or --package-path {real}."
        inside, exists = package.name == parts[0], any(_is_file(package.parent / name) for name in names)
    else:
        files = {name for name, _ in package.files}
        inside = any(name.startswith(f"{SOURCE}/{parts[0]}/") for name in files)
        exists = any(f"{SOURCE}/{name}" in files for name in names)
    return f"the package has no module {module}: expected {names[0]}." if inside and not exists else ""


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        # The name is too long or contains a NUL, or the directory can't be read.
        return False

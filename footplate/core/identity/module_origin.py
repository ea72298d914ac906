"""Where a module comes from: Python itself, an installed package, or a file of the user's.

The code of Python and of an installed package changes only with its version. Users edit the files of their own modules in
place, also those of a package that was installed as editable. A file tells which of these a module is, not its name: a
user's `tokenize.py` hides Python's. The functions of a user's compiled module have no bytecode. So its file counts as a
whole, in the place of a version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import platform
import site
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_INSTALLED = ("site-packages", "dist-packages")


def origin_of(module: str) -> str | None:
    """Return the name and version of what a module is installed with; None for a user's module.

    A user's compiled module has the name and the hash of its file.

    >>> origin_of("numpy.linalg") == f"numpy {importlib.metadata.version('numpy')}"
    True
    """
    top = module.partition(".")[0]
    loaded = sys.modules.get(module) or sys.modules.get(top)
    file = getattr(loaded, "__file__", None)
    if file is None:
        return _python() if top in sys.stdlib_module_names else None
    path = Path(file).resolve()
    if path.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve()) and not _is_packages(path):
        return _python()
    return _installed(top, path) or _compiled(path)


def package_directories() -> list[str]:
    """The directories of the packages that are installed for this interpreter."""
    directories = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        directories.append(site.getusersitepackages())
    return [path for path in dict.fromkeys(directories) if Path(path).is_dir()]


def installed_directories() -> list[str]:
    """The same, and those of Python's own modules. Those behind symbolic links are there with both names."""
    named = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *package_directories()]
    return list(dict.fromkeys([*named, *(str(Path(path).resolve()) for path in named)]))


@functools.cache
def _python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


@functools.cache
def _installed(top: str, path: Path) -> str | None:
    """Return the versions of the distributions that installed a file; None if none did."""
    # Reading the lists of all distributions takes a second. Most distributions have the name of their module.
    for name in (top, top.replace("_", "-")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            namesake = importlib.metadata.distribution(name)
            if _lists(namesake, path):
                return _version(namesake)
    if not _has_distributions(path):
        return None
    distributions = (importlib.metadata.distribution(name) for name in sorted(set(_distributions().get(top, ()))))
    return ", ".join(_version(distribution) for distribution in distributions if _holds(distribution, path)) or None


@functools.cache
def _compiled(path: Path) -> str | None:
    """Return the name and hash of a file of compiled code; None for another file."""
    is_compiled = path.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:32]}" if is_compiled else None


def _lists(distribution: importlib.metadata.Distribution, path: Path) -> bool:
    """Return True if a file is in the list of what a distribution installed. The files of an editable one aren't."""
    root = Path(str(distribution.locate_file(""))).resolve()
    record = distribution.read_text("RECORD") or ""
    return path.is_relative_to(root) and f"\n{path.relative_to(root).as_posix()}," in f"\n{record}"


def _holds(distribution: importlib.metadata.Distribution, path: Path) -> bool:
    """Return True if a distribution installed a file. One of the operating system may have no list."""
    root = Path(str(distribution.locate_file(""))).resolve()
    has_no_list = distribution.read_text("RECORD") is None
    return _lists(distribution, path) or (has_no_list and path.is_relative_to(root) and _is_packages(path))


def _has_distributions(path: Path) -> bool:
    """Return True if a directory around a file has descriptions of what is installed there."""
    around = [parent for parent in path.parents if str(parent) in {str(Path(entry).resolve()) for entry in sys.path}]
    return any(next(parent.glob(f"*.{kind}"), None) for parent in around for kind in ("dist-info", "egg-info"))


def _is_packages(path: Path) -> bool:
    return any(part in _INSTALLED for part in path.parts)


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _version(distribution: importlib.metadata.Distribution) -> str:
    """Return the name and version of a distribution, and the address that it was installed from, if there is one."""
    source = distribution.read_text("direct_url.json")
    return f"{distribution.name} {distribution.version}" + (f" from {source}" if source else "")

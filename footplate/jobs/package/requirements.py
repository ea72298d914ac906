"""The requirements of a package: `requirements.txt`, and the dependencies of `setup.py` or `pyproject.toml`.

A `setup.py` is a program. It runs (`setup.py egg_info`) where the job runs, not where the job is submitted. A
`pyproject.toml` that lists its dependencies is read.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from footplate.core.errors import PackageError

MAIN = "requirements.txt"
_LISTS = ("requirements*.txt", "constraints*.txt")
_HERE = re.compile(r"(-e\s|--editable\b|\.{0,2}/|~|\.{1,2}$|\.\[|file:|\S+ @ file:)")
_ITSELF = re.compile(r"(?:(?:-e|--editable)[\s=]*)?\.(?:/)?")
_INCLUDE = re.compile(r"(?:-r|-c|--requirement|--constraint)[\s=]*(\S+)")


def is_list(name: str) -> bool:
    """Return True if pip reads requirements from a file next to the package."""
    return any(fnmatchcase(name, pattern) for pattern in _LISTS)


def portable(name: str, content: bytes) -> bytes:
    """Remove the lines that name the package itself, such as `-e .`, from a list. The package is there anyway.

    Raises:
        PackageError: a line names something else that only this machine has.
    """
    kept = []
    for number, raw in enumerate(content.splitlines(keepends=True), 1):
        line = raw.decode("utf-8-sig", errors="replace").partition(" #")[0].strip()
        if _ITSELF.fullmatch(line):
            continue
        kept.append(raw)
        included = _INCLUDE.match(line)
        if _HERE.match(line):
            raise PackageError(
                f"{name} line {number}: {line!r} is on this machine, where the job may not run. Leave it out: the "
                "package itself is included anyway. Build a wheel of anything else, and give it with --packages."
            )
        if included and not is_list(included[1]) and "://" not in included[1]:
            raise PackageError(
                f"{name} line {number}: {line!r}: expected a file next to {name}, named requirements….txt or "
                "constraints….txt. The package includes only those."
            )
    return b"".join(kept)


def dropped(names: Sequence[str]) -> list[str]:
    """The notice about lists without the package itself; empty if there are none."""
    return [f"{', '.join(names)}: the package itself (-e .) is left out, since it is included anyway."] if names else []


def needed(source: Path, python: Path) -> list[str]:
    """The dependencies that a project declares, besides those in its `requirements.txt`.

    Args:
        source: the directory of setup.py or pyproject.toml.
        python: the interpreter for a setup.py.

    Raises:
        PackageError: the dependencies can't be determined.
    """
    if (source / "setup.py").is_file():
        return _of_setup(source, python)
    try:
        project = tomllib.loads((source / "pyproject.toml").read_text("utf-8")).get("project", {})
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise PackageError(f"pyproject.toml can't be read: {error}.") from None
    if "dependencies" in project.get("dynamic", []):
        raise PackageError("pyproject.toml: its dependencies are dynamic. Write them out, or into requirements.txt.")
    return [str(dependency) for dependency in project.get("dependencies", [])]


def _of_setup(source: Path, python: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(python), "setup.py", "-q", "egg_info", "--egg-base", scratch]
        process = subprocess.run(
            command, cwd=source, env=users_environ(), capture_output=True, text=True, errors="replace"
        )
        if process.returncode:
            raise PackageError(f"setup.py can't list its requirements: {_last_lines(process.stderr)}")
        lists = list(Path(scratch).glob("*.egg-info/requires.txt"))
        return unmarked(lists[0].read_text("utf-8")) if lists else []


def users_environ() -> dict[str, str]:
    """The environment of this process, without Footplate's variables (some are secret), and without Python's."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("FOOTPLATE_", "PYTHON"))}


def unmarked(requires: str) -> list[str]:
    """Parse an egg's requires.txt: `[:marker]` sections become markers, and sections of extras are left out.

    >>> unmarked("numpy\\n\\n[:python_version < '3.8']\\ntyping\\n\\n[dev]\\npytest")
    ['numpy', "typing; python_version < '3.8'"]
    """
    requirements, section = [], ""
    for line in map(str.strip, requires.splitlines()):
        if line.startswith("["):
            section = line[1:-1]
        elif line and not section:
            requirements.append(line)
        elif line and section.startswith(":"):
            requirements.append(f"{line}; {section[1:]}")
    return requirements


def _last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "it ended with an error."

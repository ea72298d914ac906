"""What a package says that it needs: `requirements.txt`, and `setup.py`'s or `pyproject.toml`'s dependencies.

A `setup.py` is a program, so it is asked by running it (`setup.py egg_info`) where the job runs, not where it is
submitted. A `pyproject.toml` with its dependencies written out is read.
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
    """Whether a file beside the package is one that pip reads requirements from."""
    return any(fnmatchcase(name, pattern) for pattern in _LISTS)


def portable(name: str, content: bytes) -> bytes:
    """A list without the lines that name the package itself, such as `-e .`: the package is there anyway.

    Raises:
        PackageError: a line names something else that lies on this machine alone.
    """
    kept = []
    for number, given in enumerate(content.splitlines(keepends=True), 1):
        line = given.decode("utf-8-sig", errors="replace").partition(" #")[0].strip()
        if _ITSELF.fullmatch(line):
            continue
        kept.append(given)
        included = _INCLUDE.match(line)
        if _HERE.match(line):
            raise PackageError(
                f"{name} line {number}: {line!r} lies on this machine, where the job may not run. Leave it out: the "
                "package itself is there anyway. Build a wheel of anything else, and give it with --packages."
            )
        if included and not is_list(included[1]) and "://" not in included[1]:
            raise PackageError(
                f"{name} line {number}: {line!r}: expected a file beside {name}, named requirements….txt or "
                "constraints….txt. Only those go with the package."
            )
    return b"".join(kept)


def dropped(names: Sequence[str]) -> list[str]:
    """A notice about lists in which the package itself was left out; none without such lists."""
    return [f"{', '.join(names)}: the package itself (-e .) is left out, as it is there anyway."] if names else []


def needed(source: Path, python: Path) -> list[str]:
    """The dependencies that the project in a directory declares, beside those of its `requirements.txt`.

    Args:
        source: where setup.py or pyproject.toml may be.
        python: the interpreter that is to run a setup.py.

    Raises:
        PackageError: they can't be found out.
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
    return [str(one) for one in project.get("dependencies", [])]


def _of_setup(source: Path, python: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(python), "setup.py", "-q", "egg_info", "--egg-base", scratch]
        asked = subprocess.run(
            command, cwd=source, env=users_environ(), capture_output=True, text=True, errors="replace"
        )
        if asked.returncode:
            raise PackageError(f"setup.py can't say what it needs: {_last_lines(asked.stderr)}")
        found = list(Path(scratch).glob("*.egg-info/requires.txt"))
        return unmarked(found[0].read_text("utf-8")) if found else []


def users_environ() -> dict[str, str]:
    """The variables of this process without Footplate's own, of which some are secret, and without Python's."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("FOOTPLATE_", "PYTHON"))}


def unmarked(requires: str) -> list[str]:
    """The requirements in an egg's requires.txt: `[:marker]` sections made markers, those of extras left out.

    >>> unmarked("numpy\\n\\n[:python_version < '3.8']\\ntyping\\n\\n[dev]\\npytest")
    ['numpy', "typing; python_version < '3.8'"]
    """
    found, section = [], ""
    for line in map(str.strip, requires.splitlines()):
        if line.startswith("["):
            section = line[1:-1]
        elif line and not section:
            found.append(line)
        elif line and section.startswith(":"):
            found.append(f"{line}; {section[1:]}")
    return found


def _last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "it ended with an error."

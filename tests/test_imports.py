"""Imports of Footplate's own modules resolve, also those inside functions that no test calls. Public names are complete."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import footplate as fp
from footplate import callbacks, catalog, data, tracking
from footplate.core import goodput

ROOT = Path(__file__).parent.parent
FOLDERS = ("footplate", "benchmarks", "examples", "tests")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the name of each module of Footplate that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("footplate"):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("footplate"))


def exists(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_module_of_ours_that_is_imported_exists(folder):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, module in imported(path)
        if not exists(module)
    ]
    assert not wrong


OTHER_LIBRARIES = re.compile(r"lightning|horovod|petastorm|\bestimator", re.IGNORECASE)
# Above compat, or for users.
MAY_NAME_THEM = ("footplate/compat/", "footplate/cli/")
NAMES_THEM_BECAUSE = {
    "footplate/__init__.py": "registers the adapters",
    "footplate/checkpoint/run_state.py": "Lightning's load_from_checkpoint reads its version in a checkpoint",
    "footplate/core/hooks.py": "names of recorded actions are those that readers of Lightning's profiles know",
    "footplate/training/profiling.py": "the same",
    "footplate/hardware/packages.py": "footplate doctor lists the extras",
    "footplate/jobs/package/files.py": "a folder of logs that a package leaves out",
    "footplate/tracking/mlflow_model.py": "keeps MLflow from importing Lightning",
}


def written(path: Path) -> Iterator[str]:
    """The names and texts in a file's code, without docstrings and comments."""
    tree = ast.parse(path.read_text())
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    docstrings = {body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        for name in ("id", "attr", "name", "module", "arg", "value"):
            text = getattr(node, name, None)
            if isinstance(text, str) and node not in docstrings:
                yield text


def test_below_compat_only_the_listed_files_name_another_training_library():
    names_them = {
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "footplate").rglob("*.py"))
        if any(map(OTHER_LIBRARIES.search, written(path)))
    }
    assert {path for path in names_them if not path.startswith(MAY_NAME_THEM)} == set(NAMES_THEM_BECAUSE)


@pytest.mark.parametrize(
    "package", [fp, callbacks, catalog, data, goodput, tracking], ids=lambda package: package.__name__
)
def test_a_lazy_package_tells_type_checkers_the_names_that_it_has(package):
    """Each name is written twice: under TYPE_CHECKING, and in `_HOMES`."""
    tree = ast.parse(Path(package.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == package._HOMES


@pytest.mark.parametrize(("package", "base"), [(callbacks, fp.Callback), (tracking, fp.Logger)])
def test_footplate_exports_the_callbacks_and_loggers_of_their_packages(package, base):
    def exported(names, owner):
        values = {name: getattr(owner, name) for name in names}
        return {name for name, value in values.items() if isinstance(value, type) and issubclass(value, base)}

    ours = {name for name in fp.__all__ if fp._HOMES.get(name, "").startswith(f"{package.__name__}.")}
    assert exported(ours, fp) == exported(package.__all__, package), "export them in both __init__.py"


def test_a_trainer_does_without_what_only_some_trainings_need():
    slow = [
        "pyarrow",
        "deltalake",
        "smtplib",
        "footplate.data.loader",
        "footplate.hardware.xla",
        "footplate.hardware.nvml",
    ]
    slow += ["footplate.callbacks.alert", "footplate.core.goodput.ledger", "footplate.core.html"]
    program = (
        f"import sys, footplate as fp; fp.Trainer, fp.Module; print([name for name in {slow} if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"

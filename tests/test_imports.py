"""Imports of Footplate's own modules resolve, also those inside functions that no test calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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

"""What a program will import, read from its source."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from footplate.jobs.fork_server.imports import LATER, imported_names


@pytest.fixture
def package(tmp_path: Path):
    def write(**files: str) -> Path:
        folder = tmp_path / "trainer"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        for name, text in files.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
        return tmp_path

    return write


def test_the_imports_of_a_program_and_of_its_own_modules_are_found_in_order(package):
    source = package(
        task="""
        import argparse
        from . import nets
        from trainer.data import rows
        """,
        nets="import yaml.nodes",
        data="from csv import reader",
    )
    assert imported_names(["trainer.task"], source) == [
        "argparse", "yaml", "yaml.nodes", "csv", "csv.reader",
    ]  # fmt: skip


def test_imports_in_conditions_count_and_those_of_functions_and_type_checkers_do_not(package):
    source = package(
        task="""
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            import for_checkers
        else:
            import for_programs
        try:
            import fast
        except ImportError:
            import slow
        finally:
            with suppressed():
                import within
        def main():
            import late
        """
    )
    assert imported_names(["trainer.task"], source) == [
        "typing", "typing.TYPE_CHECKING", "for_programs", "fast", "slow", "within",
    ]  # fmt: skip


def test_names_of_footplate_are_imports_wherever_they_are_used(package):
    source = package(task="import footplate as fp\ndef main():\n    fp.Trainer()\n    other.Thing()\n")
    names = imported_names(["trainer.task"], source)
    assert names == ["footplate", "footplate.Trainer", *LATER["footplate"]]


@pytest.mark.parametrize(("library", "name"), [("torch", "nn"), ("pyarrow", "parquet")])
def test_what_a_library_imports_later_is_imported_with_it(package, library: str, name: str):
    source = package(task=f"from {library} import {name}")
    assert imported_names(["trainer.task"], source) == [library, f"{library}.{name}", *LATER[library]]


def test_a_program_of_an_installed_package_is_its_own_import(tmp_path: Path):
    assert imported_names(["json.tool"], tmp_path) == ["json.tool"]


def test_a_module_with_an_error_has_no_imports(package):
    assert imported_names(["trainer.task"], package(task="import torch\nif")) == []
    assert imported_names(["trainer.task"], package(task="from .... import far")) == []

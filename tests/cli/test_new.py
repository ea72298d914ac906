"""`footplate new`: a recipe is copied as a whole or not at all."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from footplate.cli.new import RECIPES

ROOT = Path(__file__).parent.parent.parent


def files_of(directory: Path) -> dict[str, str]:
    paths = [path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(directory).as_posix(): path.read_text() for path in paths}


def test_every_recipe_is_listed_in_one_line(footplate):
    result = footplate("new", "--list")
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines()] == list(RECIPES)
    assert sorted(RECIPES) == sorted(path.name for path in (ROOT / "examples/recipes").iterdir() if path.is_dir())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_copied_and_the_next_two_commands_are_printed(footplate, tmp_path, recipe):
    target = tmp_path / "lake" / "flowers"
    result = footplate("new", target, "--recipe", recipe)
    assert result.code == 0, result.err
    assert files_of(target) == files_of(ROOT / "examples/recipes" / recipe)
    enter, start = (line.strip() for line in result.out.splitlines()[1:])
    assert enter == f"cd {target} && pip install -r requirements.txt"
    assert all(command in (target / "README.md").read_text() for command in start.split(" && "))


def test_the_empty_directory_where_you_are_is_filled(footplate, tmp_path, monkeypatch):
    here = tmp_path / "flowers"
    here.mkdir()
    monkeypatch.chdir(here)
    assert footplate("new", ".", "--recipe=tabular").code == 0
    assert Path("train.py").exists()


def test_a_copy_that_fails_leaves_no_file(footplate, tmp_path, monkeypatch):
    def fail(source: Path, target: Path, **_: object) -> Path:
        target.mkdir()
        (target / "README.md").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", fail)
    result = footplate("new", tmp_path / "flowers", "--recipe=tabular")
    assert result.code == 2
    assert f"directory={tmp_path / 'flowers'}: No space left on device." in result.err
    assert files_of(tmp_path / "flowers") == {}


def test_a_directory_with_files_stays_as_it_is(footplate, tmp_path):
    (tmp_path / "notes").write_text("mine")
    result = footplate("new", tmp_path, "--recipe=tabular")
    assert result.code == 2
    assert f"directory={tmp_path}: it isn't empty." in result.err
    assert files_of(tmp_path) == {"notes": "mine"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["flowers", "--recipe=tabulr"], 'Did you mean "tabular"?'),
        (["flowers"], "--recipe: not given. Expected one of: tabular"),
        (["--recipe=tabular"], "directory: not given."),
        (["flowers.py", "--recipe=tabular"], "directory=flowers.py: it is a file."),
        (["flowers.py/inside", "--recipe=tabular"], "Name a directory that you can write."),
    ],
)
def test_mistakes(footplate, argv, message):
    result = footplate("new", *argv)
    assert result.code == 2
    assert message in result.err
    assert not Path("flowers").exists()


def test_it_answers_without_torch(tmp_path):
    script = (
        "import sys; from footplate.cli.main import main; code = main(['new', 'flowers', '--recipe', 'tabular']); "
        "sys.exit('torch' in sys.modules or code)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=tmp_path).returncode == 0

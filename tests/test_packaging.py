"""The wheel: its contents for a user of pip, and its description on PyPI."""

from __future__ import annotations

import email
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from packaging.requirements import Requirement

import footplate as fp

ROOT = Path(__file__).parent.parent


def build(source: Path, directory: Path) -> Path:
    """Build the wheel of a source tree in a directory."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory], cwd=source, check=True)
    (built,) = directory.glob("*.whl")
    return built


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(archive.read(name).decode())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def test_its_metadata_has_the_version_of_the_code_and_a_description_whose_links_work_anywhere(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Version"] == fp.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\(([^)\s]+)\)", str(metadata.get_payload()))
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_it_has_the_files_of_every_recipe(wheel):
    recipes = ROOT / "examples/recipes"
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            name.removeprefix("footplate/recipes/"): archive.read(name)
            for name in archive.namelist()
            if name.startswith("footplate/recipes/")
        }
    paths = [path for path in recipes.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert packed == {path.relative_to(recipes).as_posix(): path.read_bytes() for path in paths}


def test_what_the_image_for_vertex_ai_copies_makes_the_same_wheel(wheel, tmp_path):
    dockerfile = (ROOT / "examples/vertex/Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE):
        *sources, target = line.split()
        for source in map(ROOT.joinpath, sources):
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, tmp_path / "source" / target, dirs_exist_ok=True, ignore=ignored)
            else:
                (tmp_path / "source" / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(source, tmp_path / "source" / target)
    built = build(tmp_path / "source", tmp_path / "dist")
    assert built.name == wheel.name
    contents = [
        {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}
        for archive in map(zipfile.ZipFile, (built, wheel))
    ]
    assert contents[0] == contents[1]

    (extras,) = re.findall(r'install --no-cache-dir "\.\[(.+)\]"', dockerfile)
    assert set(extras.split(",")) <= set(importlib.metadata.metadata("footplate").get_all("Provides-Extra") or [])


def needed(requirements: list[str], extras: set[str]) -> list[Requirement]:
    """Return those requirements of a distribution that it has on this machine, with these extras."""
    parsed = map(Requirement, requirements)
    return [
        each for each in parsed if not each.marker or any(each.marker.evaluate({"extra": e}) for e in {"", *extras})
    ]


def link_packages(requirements: list[Requirement], packages: Path) -> None:
    """Put all that these requirements need into an environment, as links to the packages of this one."""
    linked = set()
    while requirements:
        requirement = requirements.pop()
        if (key := (requirement.name, frozenset(requirement.extras))) in linked:
            continue
        linked.add(key)
        distribution = importlib.metadata.distribution(requirement.name)
        for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link(Path(str(distribution.locate_file(name))), packages)
        requirements += needed(distribution.requires or [], requirement.extras)


def link(path: Path, folder: Path) -> None:
    """Link a package in a folder of packages. A namespace, such as `google`, is shared by several distributions."""
    target = folder / path.name
    if path.is_dir() and path.suffix != ".dist-info" and not (path / "__init__.py").exists():
        target.mkdir(exist_ok=True)
        for part in path.iterdir():
            link(part, target)
    elif not target.exists():
        target.symlink_to(path)


@pytest.mark.slow
def test_installed_into_an_empty_environment_it_runs_the_demo_and_copies_a_recipe(wheel, tmp_path):
    """The environment has what the wheel requires, and nothing else: links to the suite's packages, since pip would unpack
    them for a minute. Pip checks them. `make setup` installs the same from the index.
    """
    venv.create(tmp_path / "env")
    python = tmp_path / "env/bin/python"
    (packages,) = tmp_path.glob("env/lib/python*/site-packages")
    link_packages(needed(metadata_of(wheel).get_all("Requires-Dist", []), {"demo"}), packages)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--python", python]  # a pip of its own takes seconds to install
    install = [*pip, "install", "-q", "--no-compile", "--no-index", f"{wheel}[demo]"]
    subprocess.run(install, env=environment, check=True)
    demo = [tmp_path / "env/bin/footplate", "demo", "--epochs", "1"]
    done = subprocess.run(demo, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation accuracy" in done.stdout
    run = tmp_path / "runs/demo"
    assert (run / "model.pt2").is_file()
    assert pq.read_table(run / "predictions.parquet").num_rows == 2000
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"] == torch.__version__
    page = (run / "report.html").read_text()
    assert "val_acc" in page
    assert re.search(r"of 2,000 predictions are right \([5-9]\d\.\d\d%\)", page)
    assert page.count('src="data:image/png;base64,') > 20
    new = [tmp_path / "env/bin/footplate", "new", "flowers", "--recipe", "tabular"]
    subprocess.run(new, env=environment, cwd=tmp_path, check=True)
    assert (tmp_path / "flowers/train.py").is_file()
    shutil.rmtree(tmp_path / "env")  # two gigabytes, which pytest would keep for three runs

"""Packages made for a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from footplate.jobs.package import Snapshot, snapshot


class Project:
    """A directory with a package `trainer` in it, and a home for jobs beside it."""

    def __init__(self, root: Path):
        self.root = root / "project"
        self.home = root / "home"
        self.package = self.root / "trainer"
        self.write("trainer/__init__.py", "")
        self.write("trainer/task.py", "print('one')\n")

    def write(self, name: str, content: str | bytes, mode: int = 0o644) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(mode)
        return path

    def take(self, *packages: str) -> Snapshot:
        return snapshot(self.package, packages, self.home)

    def names(self) -> list[str]:
        return [name.removeprefix("source/") for name, _ in self.take().files]


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)
